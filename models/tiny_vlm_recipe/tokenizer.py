"""A byte-level BPE tokenizer of at most 512 tokens, with Qwen's special tokens and chat format.

It is trained on the questions and answers of `questions`, so a prompt is short; other text goes by bytes.
"""

from __future__ import annotations

import itertools
import json

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX, Qwen2Tokenizer

from models.tiny_vlm_recipe.questions import QUESTIONS, SYSTEM_PROMPT, answers

VOCABULARY_SIZE = 512
END_OF_TURN = "<|im_end|>"
END_OF_TEXT = "<|endoftext|>"
IMAGE_PLACEHOLDER = "<|image_pad|>"
SPECIAL_TOKENS = (
    END_OF_TEXT,
    "<|im_start|>",
    END_OF_TURN,
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    IMAGE_PLACEHOLDER,
    "<|video_pad|>",
)
CHAT_TEMPLATE = (
    """\
{%- if messages[0]['role'] != 'system' -%}
{{- '<|im_start|>system\\n"""
    + SYSTEM_PROMPT
    + """<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] in ('image', 'image_url') or 'image' in part or 'image_url' in part -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part['type'] in ('video', 'video_url') or 'video' in part -%}
{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
{%- elif 'text' in part -%}
{{- part['text'] -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""
)


def build_tokenizer() -> Qwen2Tokenizer:
    """Return the tokenizer; it depends on the questions and on nothing else."""
    vocabulary, merges = _learn_merges()
    return Qwen2Tokenizer(
        vocab=vocabulary,
        merges=merges,
        eos_token=END_OF_TURN,
        pad_token=END_OF_TEXT,
        extra_special_tokens=list(SPECIAL_TOKENS),
        model_max_length=4096,
        chat_template=CHAT_TEMPLATE,
    )


def _learn_merges() -> tuple[dict[str, int], list[tuple[str, str]]]:
    learner = Tokenizer(models.BPE())
    learner.normalizer = normalizers.NFC()
    learner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    learner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE - len(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
        min_frequency=1,
    )
    roles = (SYSTEM_PROMPT, "system\n", "user\n", "assistant\n")
    learner.train_from_iterator(itertools.chain(QUESTIONS, roles, answers()), trainer)
    learned = json.loads(learner.to_str())["model"]
    return learned["vocab"], [(left, right) for left, right in learned["merges"]]
