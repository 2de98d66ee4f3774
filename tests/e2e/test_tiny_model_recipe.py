"""`scripts/make-tiny-model`: reproducible training, random checkpoints, exit statuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from models.tiny_vlm_recipe.__main__ import main
from models.tiny_vlm_recipe.architecture import ARCHITECTURES
from models.tiny_vlm_recipe.checkpoint import digests
from models.tiny_vlm_recipe.evaluation import Tally
from models.tiny_vlm_recipe.pictures import SEEDS_PER_RUN
from models.tiny_vlm_recipe.recipes import RECIPES, shortfalls
from models.tiny_vlm_recipe.training import Recipe, train
from tests.e2e.reference import Reference
from tests.e2e.tiny_pictures import ask, held_out_pictures

pytestmark = [pytest.mark.e2e, pytest.mark.worker]


def shortened(recipe: Recipe) -> Recipe:
    """Return the recipe with few steps and small batches."""
    return replace(
        recipe,
        tower=replace(recipe.tower, steps=3, batch=4),
        language=replace(recipe.language, steps=3, batch=4),
    )


def trained_weights(architecture: str, seed: int) -> dict[str, bytes]:
    """Train for a few steps; return each weight's bytes."""
    network = train(architecture, shortened(RECIPES[architecture]), seed, lambda line: None).network
    return {name: weight.numpy().tobytes() for name, weight in network.state_dict().items()}


@pytest.mark.parametrize("architecture", RECIPES)
def test_training_follows_from_the_seed_alone(architecture: str) -> None:
    """The same seed gives the same weights bit for bit, whatever ran before; another seed gives others."""
    first = trained_weights(architecture, seed=1)
    torch.rand(5)

    assert trained_weights(architecture, seed=1) == first
    assert trained_weights(architecture, seed=2) != first


@pytest.mark.parametrize("architecture", RECIPES)
def test_training_stays_within_its_picture_seeds(architecture: str) -> None:
    """A run cannot reach the seeds of the next run, nor its tower stage those of its language stage."""
    recipe = RECIPES[architecture]

    assert recipe.tower.steps * recipe.tower.batch <= SEEDS_PER_RUN // 2
    assert recipe.language.steps * recipe.language.batch * 3 <= SEEDS_PER_RUN // 2


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_random_checkpoints_run_whole(architecture: str, tmp_path: Path) -> None:
    """An untrained checkpoint of every architecture loads and generates from two pictures."""
    assert main(["--random", "--arch", architecture, "--out", str(tmp_path)]) == 0

    answer = Reference(tmp_path).answer(ask(held_out_pictures(2)), max_tokens=3)

    assert len(answer.token_ids) in (1, 2, 3)


def test_random_sizes_types_and_shards_are_as_asked(tmp_path: Path) -> None:
    """Widths, depths, element type and file size of a random checkpoint are those of the flags."""
    words = "--random --lm-hidden 128 --lm-layers 5 --vis-hidden 96 --vis-depth 3 --dtype bfloat16"

    assert main([*words.split(), "--shard-bytes", "400000", "--out", str(tmp_path)]) == 0

    config = json.loads((tmp_path / "config.json").read_text())
    assert config["text_config"]["hidden_size"] == 128
    assert config["text_config"]["num_hidden_layers"] == 5
    assert config["vision_config"]["hidden_size"] == 96
    assert config["vision_config"]["depth"] == 3
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 1
    assert max(shard.stat().st_size for shard in shards) < 450_000
    assert (tmp_path / "model.safetensors.index.json").is_file()
    assert {weight.dtype for shard in shards for weight in load_file(shard).values()} == {torch.bfloat16}


def test_random_checkpoints_follow_from_the_seed(tmp_path: Path) -> None:
    """Random weights are as reproducible as trained ones."""
    for name, seed in (("a", "4"), ("b", "4"), ("c", "5")):
        assert main(["--random", "--seed", seed, "--out", str(tmp_path / name)]) == 0

    a, b, c = (digests(tmp_path / name) for name in "abc")
    assert a == b
    assert a["model.safetensors"] != c["model.safetensors"]


def test_check_fails_a_checkpoint_that_knows_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An untrained checkpoint falls short: exit 1, the numbers on stdout and the reasons on stderr."""
    main(["--random", "--out", str(tmp_path)])
    capsys.readouterr()

    assert main(["--check", "--per-task", "100", "--out", str(tmp_path)]) == 1

    printed = capsys.readouterr()
    assert printed.out.splitlines()[0].startswith("plain")
    assert "plain colour: 0.000 right, at least 0.98 promised" in printed.err


def test_answers_without_embeddings_must_look_guessed() -> None:
    """Chance and luck pass however few were asked; an answer that needs no embeddings does not."""
    for asked, right, is_short in ((48, 10, False), (960, 80, False), (48, 40, True), (960, 240, True)):
        blind = Tally()
        blind.add("colour", [True] * right + [False] * (asked - right))

        found = shortfalls({"plain": Tally(), "reversed": Tally(), "zeroed": Tally(), "shuffled": blind})

        assert bool(found) == is_short


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--arch qwen2_5_vl", "--out is missing: name the folder of the checkpoint"),
        ("--lm-hidden 128 --out x", "--lm-hidden needs --random"),
        ("--random --lm-hidden 100 --out x", "lm_hidden is 100: it must be a multiple of 64"),
        ("--arch qwen2_vl --out x", "there is no training recipe for qwen2_vl: add --random"),
        ("--seed 1000 --out x", "seed is 1000: it must lie in 0..999"),
        ("--check --out x", "x holds no checkpoint"),
        ("--check --per-task 0 --out x", "--per-task is 0: it must be at least 100"),
    ],
)
def test_bad_flags_exit_2_and_say_what_to_do(
    words: str,
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each mistake is named with its flag and what to do about it, and nothing is written."""
    monkeypatch.chdir(tmp_path)

    with pytest.raises(SystemExit) as ended:
        main(words.split())

    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_example_pictures_are_the_script_s(tmp_path: Path) -> None:
    """The pictures under `examples/` are what the script draws."""
    assert main(["--pictures", str(tmp_path)]) == 0

    examples = Path(__file__).resolve().parents[2] / "examples"
    for name in ("red.png", "blue.png", "green.png"):
        with Image.open(tmp_path / name) as drawn, Image.open(examples / name) as committed:
            assert drawn.tobytes() == committed.tobytes()
