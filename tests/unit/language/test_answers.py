"""Answers against what vLLM 0.32.0 was captured to answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from epdctl.worker.language.answers import (
    AnswerFrame,
    Prompted,
    chat_answer,
    chat_chunk,
    chat_role_chunk,
    chat_usage_chunk,
    completion_answer,
    completion_chunk,
)
from epdctl.worker.language.choice import Choice, TextRules
from epdctl.worker.language.messages import Token

pytestmark = pytest.mark.unit

CAPTURES = Path(__file__).parent / "captures"
RULES = TextRules(token_bytes=lambda i: bytes([i]), is_special=lambda _: False, stops=["the5"])


def capture(name: str) -> Any:
    """Return a captured answer: an object, or the list of a stream's events."""
    return json.loads((CAPTURES / name).read_text())


def frame(example: Any, **rest: Any) -> AnswerFrame:
    """Return the frame that a captured answer had."""
    facts = {"prompt_ids": [0] * 56, "return_token_ids": False, "want_logprobs": False, "rules": RULES} | rest
    return AnswerFrame(
        id=example["id"],
        created=example["created"],
        model=example["model"],
        fingerprint="vllm-0.32.0-5f3ca370",
        **facts,
    )


def told(tokens: list[Token], rules: TextRules = RULES) -> Choice:
    """Return a choice that took these tokens."""
    choice = Choice(rules)
    for token in tokens:
        choice.take(token)
    return choice


def test_a_chat_answer_is_vllms_to_the_byte() -> None:
    """Same fields, same order, same values as the captured answer."""
    expected = capture("one_image.json")
    text = expected["choices"][0]["message"]["content"]
    tokens = [Token(0, byte) for byte in text.encode()]
    tokens[-1] = Token(0, tokens[-1].id, "length")
    without_stops = TextRules(token_bytes=RULES.token_bytes, is_special=RULES.is_special)
    answer = chat_answer(frame(expected), [told(tokens, without_stops)])
    # The captured vocabulary has longer tokens than this one of bytes.
    answer["usage"] = expected["usage"]

    assert json.dumps(answer) == json.dumps(expected)


def test_logprobs_token_ids_and_stop_reason_have_vllms_shape() -> None:
    """With logprobs, ids and a stop string the answer has the captured shape, field by field."""
    expected = capture("one_image_extras.json")
    tokens = [Token(0, byte, None, -1.5, ((byte, -1.5), (103, -3.25))) for byte in b"ll5=-Ethe5"]
    prompt = expected["prompt_token_ids"]
    built = frame(expected, prompt_ids=prompt, return_token_ids=True, want_logprobs=True)
    answer = chat_answer(built, [told(tokens)])
    choice, captured = answer["choices"][0], expected["choices"][0]
    first = choice["logprobs"]["content"][0]

    assert (choice["message"], choice["stop_reason"]) == (captured["message"], captured["stop_reason"])
    assert list(choice) == list(captured)
    assert list(first) == list(captured["logprobs"]["content"][0])
    assert first["top_logprobs"][0] == {"token": "l", "logprob": -1.5, "bytes": [108]}
    assert (choice["token_ids"], answer["prompt_token_ids"]) == (list(b"ll5=-Ethe5"), prompt)


def test_chunks_are_vllms_to_the_byte() -> None:
    """First, middle, last and usage chunk of a stream equal the captured ones."""
    events = capture("one_image_stream.json")
    built = frame(events[0])
    choice = Choice(RULES)
    middle = choice.take(Token(0, ord("l")))
    last = choice.take(Token(0, ord(">"), "length"))
    chunks = [
        chat_role_chunk(built, 0),
        chat_chunk(built, 0, middle),
        chat_chunk(built, 0, last),
        chat_usage_chunk(built, 24),
    ]

    assert [json.dumps(chunk) for chunk in chunks] == [json.dumps(events[i]) for i in (0, 1, -2, -1)]


def test_completion_choices_of_several_prompts_are_numbered_through() -> None:
    """Two prompts with two choices each are choices 0 to 3, and usage counts all of them."""
    example = {"id": "cmpl-1", "created": 1, "model": "m"}
    choices = [told([Token(0, 65, "length")]) for _ in range(4)]
    prompts = [
        Prompted(token_ids=[1, 2], choices=choices[:2]),
        Prompted(token_ids=[1, 2, 3], choices=choices[2:]),
    ]
    answer = completion_answer(frame(example), prompts)

    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == 5
    assert answer["usage"]["completion_tokens"] == 4


def test_completion_logprobs_have_text_offsets() -> None:
    """Log probabilities of a completion say where each token's text starts."""
    example = {"id": "cmpl-1", "created": 1, "model": "m"}
    choice = Choice(RULES)
    delta = choice.take(Token(0, 65, None, -0.5, ((66, -1.0),)))
    chunk = completion_chunk(frame(example, want_logprobs=True), 0, delta, 7)

    assert chunk["choices"][0]["logprobs"] == {
        "text_offset": [7],
        "token_logprobs": [-0.5],
        "tokens": ["A"],
        "top_logprobs": [{"B": -1.0, "A": -0.5}],
    }
