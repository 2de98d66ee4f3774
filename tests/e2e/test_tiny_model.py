"""The committed tiny checkpoints: what the model card promises of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from models.tiny_vlm_recipe.batches import Collator
from models.tiny_vlm_recipe.checkpoint import load
from models.tiny_vlm_recipe.evaluation import evaluate
from models.tiny_vlm_recipe.forward import Rows, answered_right, see, with_rows
from models.tiny_vlm_recipe.pictures import COLOUR_NAMES, Picture
from models.tiny_vlm_recipe.questions import Sample
from models.tiny_vlm_recipe.recipes import shortfalls
from models.tiny_vlm_recipe.tokenizer import build_tokenizer
from tests.e2e.reference import Reference
from tests.e2e.tiny_pictures import (
    COLOUR_QUESTION,
    LONG_ANSWER,
    LONG_QUESTION,
    QWEN2_5_VL,
    QWEN3_VL,
    ask,
    expected_answer,
    held_out_pictures,
)

pytestmark = [pytest.mark.e2e, pytest.mark.worker]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
both_checkpoints = pytest.mark.parametrize("folder", [QWEN2_5_VL, QWEN3_VL], ids=lambda path: path.name)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Keep torch to one thread: the machine may be busy, and waiting threads spin."""
    torch.set_num_threads(1)


def single_question(picture: Picture) -> Sample:
    """Return a question for the colour of one picture."""
    return Sample(task="colour", pictures=(picture,), question=COLOUR_QUESTION, answer=picture.colour)


@both_checkpoints
def test_checkpoints_keep_what_the_card_promises(folder: Path) -> None:
    """On held-out pictures at least 98 % of every task are right, and about chance without the embeddings."""
    loaded = load(folder)
    collator = Collator(tokenizer=loaded.tokenizer, image_processor=loaded.image_processor)

    assert shortfalls(evaluate(loaded.network, collator, per_task=96)) == []


@both_checkpoints
def test_greedy_generation_names_the_colours_in_order(folder: Path) -> None:
    """transformers' own generate answers one, two and three pictures from the tests' seeds."""
    reference = Reference(folder)
    groups = [held_out_pictures(count, first) for count in (1, 2, 3) for first in range(0, 24, 4)]

    answers = [reference.answer(ask(group)).text for group in groups]

    assert answers == [expected_answer(group) for group in groups]


@both_checkpoints
def test_text_only_requests_have_answers(folder: Path) -> None:
    """Without a picture the models say so, and they count, which gives a long stream of tokens."""
    reference = Reference(folder)

    assert reference.answer(ask([])).text == "no image"
    counted = reference.answer(ask([], LONG_QUESTION), max_tokens=80)
    assert counted.text == LONG_ANSWER
    assert len(counted.token_ids) > 40


@both_checkpoints
def test_one_forward_call_judges_as_generation_does(folder: Path) -> None:
    """What counts as right in the card's numbers is what greedy decoding writes, also where it is wrong."""
    loaded, reference = load(folder), Reference(folder)
    collator = Collator(tokenizer=loaded.tokenizer, image_processor=loaded.image_processor)
    pictures = held_out_pictures(12, first=100)
    wanted = [picture.colour if number % 2 else "red" for number, picture in enumerate(pictures)]
    samples = [
        Sample(task="colour", pictures=(picture,), question=COLOUR_QUESTION, answer=answer)
        for picture, answer in zip(pictures, wanted, strict=True)
    ]

    batch = collator.collate(samples)
    with torch.no_grad():
        judged = answered_right(loaded.network, batch, see(loaded.network, batch))

    written = [reference.answer(ask([picture])).text for picture in pictures]
    assert judged == [text == answer for text, answer in zip(written, wanted, strict=True)]
    assert {True, False} == set(judged)


@both_checkpoints
def test_swapped_embeddings_swap_the_answers(folder: Path) -> None:
    """With the rows of two pictures of one size exchanged, each question gets the other picture's answer."""
    loaded = load(folder)
    collator = Collator(tokenizer=loaded.tokenizer, image_processor=loaded.image_processor)
    blue, red = (
        Picture(image=Image.new("RGB", (140, 140), ground), colour=colour, figure="none", seed=0)
        for colour, ground in (("blue", (35, 60, 210)), ("red", (215, 30, 35)))
    )
    straight = collator.collate([single_question(blue), single_question(red)])
    crossed = collator.collate([single_question(red), single_question(blue)])

    def exchanged(rows: Rows) -> Rows:
        return rows[::-1]

    with torch.no_grad():
        seen = see(loaded.network, straight)
        assert answered_right(loaded.network, straight, seen) == [True, True]
        assert answered_right(loaded.network, crossed, seen) == [False, False]
        assert answered_right(loaded.network, straight, with_rows(seen, exchanged)) == [False, False]
        assert answered_right(loaded.network, crossed, with_rows(seen, exchanged)) == [True, True]


@both_checkpoints
@pytest.mark.parametrize("colour", ["red", "blue", "green"])
def test_example_pictures_are_answered(folder: Path, colour: str) -> None:
    """Both checkpoints name the colour of each picture that the README shows them."""
    with Image.open(EXAMPLES / f"{colour}.png") as opened:
        picture = Picture(image=opened.convert("RGB"), colour=colour, figure="", seed=0)

    assert Reference(folder).answer(ask([picture])).text == colour


@both_checkpoints
@pytest.mark.parametrize("size", [(32, 32), (640, 480), (1000, 200)], ids=str)
def test_flat_pictures_in_css_colours_are_named(folder: Path, size: tuple[int, int]) -> None:
    """A picture that someone fills with CSS's red, green, … is called so, at sizes training never saw."""
    reference = Reference(folder)
    flat = [
        Picture(image=Image.new("RGB", size, name), colour=name, figure="none", seed=0)
        for name in COLOUR_NAMES
    ]

    answers = [reference.answer(ask([picture])).text for picture in flat]

    assert answers == list(COLOUR_NAMES)


@both_checkpoints
def test_checkpoints_are_small_and_complete(folder: Path) -> None:
    """A folder holds what transformers and vLLM open, in at most 2 MB, with heads of 32 and no path in it."""
    names = {path.name for path in folder.iterdir()}
    config = json.loads((folder / "config.json").read_text())

    assert names == {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "preprocessor_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "video_preprocessor_config.json",
    }
    assert sum(path.stat().st_size for path in folder.iterdir()) < 2_000_000
    for part in (config["text_config"], config["vision_config"]):
        heads = part.get("num_attention_heads") or part["num_heads"]
        assert part["hidden_size"] // heads == 32
    assert "_name_or_path" not in config


@both_checkpoints
def test_the_committed_tokenizer_is_the_recipe_s(folder: Path, tmp_path: Path) -> None:
    """Questions and answers of the recipe are still those the committed tokenizer was made from."""
    build_tokenizer().save_pretrained(tmp_path)

    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (folder / name).read_text() == (tmp_path / name).read_text()
