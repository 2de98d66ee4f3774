"""The language model alone, fed with the tower's output, against the whole network in transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from epdctl.worker.language.batch import Batch, Limits, Order
from epdctl.worker.language.checkpoint import UnsupportedCheckpoint, open_checkpoint
from epdctl.worker.language.content import MediaRules, parse_messages
from epdctl.worker.language.kv import KvPool
from epdctl.worker.language.model import load_language_model
from epdctl.worker.language.params import Sampling
from epdctl.worker.language.placement import place_images
from epdctl.worker.language.positions import PlacedImage, mrope_positions
from epdctl.worker.language.prompt import Tokenizer
from epdctl.worker.language.runner import PlacedEmbedding, Prompt, Runner, build_prompt
from epdctl.worker.language.sampling import Sampler
from tests.e2e.reference import Reference
from tests.e2e.tiny_pictures import LONG_QUESTION, QWEN2_5_VL, QWEN3_VL, Picture, ask, held_out_pictures
from tests.e2e.tower import Tower
from tests.unit.language.random_model import write_qwen2_vl

pytestmark = [pytest.mark.unit, pytest.mark.worker]

CPU = torch.device("cpu")
MAX_TOKENS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A prompt, and what the whole network answers to it."""

    prompt: Prompt
    expected: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A checkpoint's language model and prompts for it."""

    folder: Path
    model: Any
    spec: Any
    cases: tuple[Case, ...]

    def generate(self, cases: Sequence[Case], **limits: int) -> tuple[list[list[int]], int]:
        """Run the prompts together; return each one's tokens and the number of steps."""
        settings = {"step_tokens": 256, "sequences": 32, "waiting": 1000} | limits
        pool = KvPool(self.spec, 8 << 20, CPU)
        batch = Batch(Limits(**settings), pool, kv_tokens=pool.tokens)
        runner = Runner(self.model)
        for number, case in enumerate(cases):
            sampler = Sampler(Sampling(max_tokens=MAX_TOKENS, temperature=0), self.spec.eos_token_ids)
            runner.add(str(number), case.prompt, sampler)
            length = case.prompt.token_ids.shape[0]
            stops = frozenset(self.spec.eos_token_ids)
            batch.submit(
                Order(request_id=str(number), prompt_tokens=length, max_tokens=MAX_TOKENS, stops=stops)
            )
        tokens: list[list[int]] = [[] for _ in cases]
        steps = 0
        while (plan := batch.plan()) is not None:
            steps += 1
            chosen = runner.run(plan)
            for event in batch.commit(plan, {key: choice.token for key, choice in chosen.items()}):
                tokens[int(event.key.request_id)].append(event.token)
        assert pool.arena.bytes_by_state()["used"] == 0
        return tokens, steps


def conversations() -> list[tuple[list[dict[str, Any]], list[Picture]]]:
    """Return 24 mixed conversations: one, two and three pictures, text only, several turns."""
    pictures = held_out_pictures(24, first=300)
    one = [(ask([picture]), [picture]) for picture in pictures[:8]]
    two = [(ask(pictures[i : i + 2]), list(pictures[i : i + 2])) for i in range(8, 16, 2)]
    three = [(ask(pictures[i : i + 3]), list(pictures[i : i + 3])) for i in range(12, 24, 3)]
    texts = [
        ([{"role": "user", "content": text}], [])
        for text in ("What is the color of the image?", LONG_QUESTION)
    ]
    turns = []
    for i in range(6):
        said = {"role": "assistant", "content": "red"}
        turns.append(([*ask([pictures[i]]), said, *ask([pictures[i + 6]])], [pictures[i], pictures[i + 6]]))
    return [*one, *two, *three, *texts, *turns]


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """Load a checkpoint of each family in both ways, and prepare the prompts."""
    trained = {"qwen2_5_vl": QWEN2_5_VL, "qwen3_vl": QWEN3_VL}
    folder = trained.get(request.param) or write_qwen2_vl(tmp_path_factory.mktemp("qwen2_vl"))
    torch.set_num_threads(1)
    checkpoint = open_checkpoint(str(folder), "auto")
    tokenizer, tower, reference = Tokenizer(checkpoint), Tower(folder), Reference(folder)
    cases = []
    for messages, pictures in conversations():
        prompt = prompt_of(checkpoint.spec, tokenizer, tower, messages, pictures)
        answer = reference.answer(messages, MAX_TOKENS)
        assert prompt.token_ids.tolist() == list(answer.prompt_token_ids)
        cases.append(Case(prompt=prompt, expected=answer.token_ids))
    model = load_language_model(checkpoint, CPU)
    return Bench(folder=folder, model=model, spec=checkpoint.spec, cases=tuple(cases))


def prompt_of(
    spec: Any, tokenizer: Tokenizer, tower: Tower, messages: list[dict[str, Any]], pictures: list[Picture]
) -> Prompt:
    """Return the prompt as the worker builds it, with the tower's rows as pushed embeddings."""
    encoded = tower.encode([picture.image for picture in pictures])
    grids = iter(encoded)
    rewritten = [message | {"content": rewrite(message["content"], grids)} for message in messages]
    parsed, images = parse_messages(rewritten, MediaRules(merge=spec.merge))
    ids = tokenizer.chat(
        parsed,
        tools=None,
        add_generation_prompt=True,
        continue_final_message=False,
        template_kwargs={},
        most=4096,
    )
    expanded, placed = place_images(ids, images, (), spec=spec)
    places = [PlacedImage(offset=image.offset, grid=image.grid) for image in placed]
    positions = mrope_positions(len(expanded), places, spec.merge)
    pairs = zip(placed, encoded, strict=True)
    embeddings = [PlacedEmbedding(offset=image.offset, rows=e.rows) for image, e in pairs]
    return build_prompt(expanded, positions, embeddings, CPU)


def rewrite(content: Any, grids: Any) -> Any:
    """Return message content with each picture replaced by its metadata, as the proxy does."""
    if isinstance(content, str):
        return content
    return [
        {"type": "image_embeds", "uuid": "u", "image_embeds": {"image_grid_thw": list(next(grids).grid)}}
        if part["type"] == "image_url"
        else part
        for part in content
    ]


class TestIdentity:
    """Tokens are those of the whole network, whatever runs beside a request."""

    @pytest.mark.parametrize(
        "limits",
        [
            {"step_tokens": 2048, "sequences": 1},
            {"step_tokens": 2048, "sequences": 32},
            {"step_tokens": 40, "sequences": 32},
            {"step_tokens": 7, "sequences": 5},
        ],
        ids=["alone", "together", "in_chunks", "in_small_chunks"],
    )
    def test_tokens_equal_the_whole_networks(self, bench: Bench, limits: dict[str, int]) -> None:
        """24 mixed requests give transformers' own tokens: alone, batched, and with prompts cut in chunks."""
        tokens, _ = bench.generate(bench.cases, **limits)

        assert [tuple(t) for t in tokens] == [case.expected for case in bench.cases]

    def test_batching_saves_steps(self, bench: Bench) -> None:
        """Together the requests take a fraction of the steps they take one after another."""
        _, alone = bench.generate(bench.cases, sequences=1)
        _, together = bench.generate(bench.cases)

        assert together * 3 < alone

    def test_swapped_embeddings_change_the_answers(self, bench: Bench) -> None:
        """It is the pushed embedding that is read: with two requests' rows exchanged both answers change."""
        first, second = bench.cases[0], bench.cases[1]
        swapped = [
            Case(prompt=exchange(first.prompt, second.prompt), expected=second.expected),
            Case(prompt=exchange(second.prompt, first.prompt), expected=first.expected),
        ]
        tokens, _ = bench.generate(swapped)

        assert tuple(tokens[0]) != first.expected
        assert tuple(tokens[1]) != second.expected


def exchange(prompt: Prompt, other: Prompt) -> Prompt:
    """Return `prompt` with the other's rows, shortened or repeated to fit: a picture is one colour."""
    (mine,), (theirs,) = prompt.embeddings, other.embeddings
    count = mine.rows.shape[0]
    rows = theirs.rows.repeat(count // theirs.rows.shape[0] + 1, 1)[:count]
    return Prompt(
        token_ids=prompt.token_ids,
        positions=prompt.positions,
        delta=prompt.delta,
        embeddings=(PlacedEmbedding(offset=mine.offset, rows=rows),),
    )


class TestPositions:
    """Our arithmetic against transformers' get_rope_index."""

    @pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
    def test_positions_equal_get_rope_index(self, family: str) -> None:
        """For images of odd shapes between texts the three axes and the offset are transformers' own."""
        config = AutoConfig.for_model(family)
        config.text_config.num_hidden_layers = 1
        with torch.device("meta"):
            network = AutoModelForImageTextToText.from_config(config).model
        merge = config.vision_config.spatial_merge_size
        grids = [(1, 4, 10), (1, 8, 2), (1, 6, 6)]
        ids, places = [1, 1, 1], []
        for grid in grids:
            places.append(PlacedImage(offset=len(ids), grid=grid))
            ids += [config.image_token_id] * (grid[1] * grid[2] // merge**2) + [1, 1]
        tokens = torch.tensor([ids])
        expected, delta = network.get_rope_index(
            tokens,
            mm_token_type_ids=(tokens == config.image_token_id).int(),
            image_grid_thw=torch.tensor(grids),
        )
        positions = mrope_positions(len(ids), places, merge)

        assert [list(positions.time), list(positions.height), list(positions.width)] == expected[
            :, 0
        ].tolist()
        assert positions.delta == int(delta)

    @pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
    def test_positions_of_videos_equal_get_rope_index(self, family: str) -> None:
        """Frame groups are as far apart as transformers puts them, beside images and texts."""
        config = AutoConfig.for_model(family)
        config.text_config.num_hidden_layers = 1
        with torch.device("meta"):
            network = AutoModelForImageTextToText.from_config(config).model
        merge = config.vision_config.spatial_merge_size
        step = getattr(config.vision_config, "tokens_per_second", 1)
        grids = [(2, 12, 10), (1, 8, 2), (3, 6, 26)]
        kinds, ids, places = [2, 1, 2], [1, 1, 1], []
        types = [0, 0, 0]
        for kind, grid in zip(kinds, grids, strict=True):
            places.append(PlacedImage(offset=len(ids), grid=grid, step=step if kind == 2 else 1))
            rows = grid[0] * grid[1] * grid[2] // merge**2
            ids += [config.video_token_id if kind == 2 else config.image_token_id] * rows + [1, 1]
            types += [kind] * rows + [0, 0]
        expected, delta = network.get_rope_index(
            torch.tensor([ids]),
            mm_token_type_ids=torch.tensor([types]),
            image_grid_thw=torch.tensor(grids[1:2]),
            video_grid_thw=torch.tensor(grids[::2]),
        )
        positions = mrope_positions(len(ids), places, merge)

        ours = [list(positions.time), list(positions.height), list(positions.width)]
        assert ours == expected[:, 0].tolist()
        assert positions.delta == int(delta)


class TestLoading:
    """The language model alone."""

    def test_no_vision_parameter_is_held(self, bench: Bench) -> None:
        """The parameters are exactly those of the network's language half."""
        whole = AutoModelForImageTextToText.from_pretrained(bench.folder, local_files_only=True)
        language = {name for name, _ in whole.model.language_model.named_parameters()}

        assert set(bench.model.parameter_names()) == language | {"lm_head.weight"}

    def test_the_towers_tensors_are_not_read(self, bench: Bench, tmp_path: Path) -> None:
        """A checkpoint whose tower is missing serves just as well."""
        folder = copy_without(bench.folder, tmp_path, "visual")
        model = load_language_model(open_checkpoint(str(folder), "auto"), CPU)
        lame = Bench(folder=folder, model=model, spec=bench.spec, cases=bench.cases)
        tokens, _ = lame.generate(bench.cases[:3])

        assert [tuple(t) for t in tokens] == [case.expected for case in bench.cases[:3]]

    def test_a_missing_language_tensor_is_refused(self, bench: Bench, tmp_path: Path) -> None:
        """A checkpoint that lacks a layer's weight is refused by name at start."""
        folder = copy_without(bench.folder, tmp_path, "layers.1.mlp")
        with pytest.raises(UnsupportedCheckpoint, match="do not fit"):
            load_language_model(open_checkpoint(str(folder), "auto"), CPU)

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"model_type": "llama"}, "model type llama is not one of"),
            ({"quantization_config": {"quant_method": "fp8"}}, "quantized"),
        ],
    )
    def test_other_kinds_are_refused(self, tmp_path: Path, change: dict[str, Any], reason: str) -> None:
        """What is not served is refused before anything is loaded."""
        shutil.copytree(QWEN2_5_VL, tmp_path, dirs_exist_ok=True)
        config = json.loads((tmp_path / "config.json").read_text()) | change
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(UnsupportedCheckpoint, match=reason):
            open_checkpoint(str(tmp_path), "auto")

    def test_an_absent_model_is_refused(self) -> None:
        """What is neither a folder nor a name a hub could know is named in the reason."""
        with pytest.raises(UnsupportedCheckpoint, match="no such model"):
            open_checkpoint("no such model", "auto")


def copy_without(folder: Path, target: Path, word: str) -> Path:
    """Copy a checkpoint, leaving out the tensors whose name holds `word`."""
    shutil.copytree(folder, target, dirs_exist_ok=True)
    with safe_open(folder / "model.safetensors", "pt") as file:
        kept = {key: file.get_tensor(key) for key in file.keys() if word not in key}  # noqa: SIM118
    save_file(kept, target / "model.safetensors", metadata={"format": "pt"})
    return target
