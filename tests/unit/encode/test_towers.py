"""Every family of towers: loaded without its language model, beside the whole model of transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from epdctl.errors import InvalidRequest, UnsupportedMedia
from epdctl.worker.encode.checkpoint import tower_files, tower_name
from epdctl.worker.encode.layout import ItemLayout
from epdctl.worker.encode.options import ItemOptions, PrepareLimits
from epdctl.worker.encode.preparer import Preparer
from epdctl.worker.encode.vision import Tower
from epdctl.worker.engine import StartFailed
from tests.stubs.towers import FAMILIES, WholeModel, tower_pictures, write_tower_checkpoint

pytestmark = [pytest.mark.unit, pytest.mark.worker]

LIMITS = PrepareLimits(
    max_pixels=10**6, max_rows=10**4, max_video_frames=8, max_video_pixels=10**6, video_timeout_s=10.0
)
TOLERANCE = {"float32": 2e-5, "bfloat16": 0.02, "float16": 0.003}
"""Largest difference of an element, as a part of the largest element of the rows; see docs/behaviour.md."""

Item = tuple[torch.Tensor, ItemLayout]


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the tiny random checkpoint of each family in turn."""
    made = tmp_path_factory.mktemp("model") / str(request.param)
    write_tower_checkpoint(made, str(request.param))
    return made


@pytest.fixture(scope="module")
def items(folder: Path) -> list[Item]:
    """Return pictures of several sizes as the front prepares them."""
    preparer = Preparer(folder, LIMITS)
    prepared = [preparer.prepare(data, ItemOptions()) for data in tower_pictures()]
    return [(torch.from_numpy(one.pixels), one.layout) for one in prepared]


def load(folder: Path, dtype: str = "float32") -> Tower:
    """Return the tower of a checkpoint."""
    return Tower.load(folder, dtype=dtype, device="cpu", threads=1)


def encode(tower: Tower, items: list[Item]) -> list[torch.Tensor]:
    """Return the rows of each item of one forward, as they would lie in the arena."""
    assert all(tower.takes(layout) for _, layout in items)
    outputs = tower.encode(items)
    dtype = getattr(torch, tower.dtype)
    found = []
    for index, (_, layout) in enumerate(items):
        target = bytearray(tower.nbytes_of(layout.rows))
        outputs.copy_rows(index, memoryview(target))
        found.append(torch.frombuffer(target, dtype=dtype).view(layout.rows, tower.width))
    return found


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference as a part of the largest element."""
    assert found.shape == expected.shape
    return float((found.float() - expected.float()).abs().max() / expected.float().abs().max())


def test_rows_are_those_of_the_whole_model(folder: Path, items: list[Item]) -> None:
    """Each picture has the rows that transformers' `get_image_features` of the whole model gives."""
    whole = WholeModel(folder)
    expected = [whole.rows(data) for data in tower_pictures()]

    for item, rows in zip(items, expected, strict=True):
        (found,) = encode(load(folder), [item])
        assert difference(found, rows) <= 1e-6
    assert difference(expected[0][:4], expected[1][:4]) > 0.01


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_rows_do_not_depend_on_the_batch(folder: Path, items: list[Item], dtype: str) -> None:
    """Alone, in a batch and in the reversed batch an item has the same rows within the stated tolerance."""
    tower = load(folder, dtype)

    alone = [encode(tower, [item])[0] for item in items]
    together = encode(tower, items)
    reversed_batch = encode(tower, items[::-1])[::-1]

    for one, other, third in zip(alone, together, reversed_batch, strict=True):
        assert difference(other, one) <= TOLERANCE[dtype]
        assert difference(third, one) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_data_type_of_the_rows_is_the_one_asked_for(folder: Path, items: list[Item], dtype: str) -> None:
    """With `--dtype` the rows have that type, and are the float32 rows within the stated tolerance."""
    exact, found = encode(load(folder), items), encode(load(folder, dtype), items)

    assert {str(rows.dtype) for rows in found} == {f"torch.{dtype}"}
    assert max(map(difference, found, exact)) <= TOLERANCE[dtype]


def test_language_weights_are_never_opened(folder: Path, tmp_path: Path) -> None:
    """The tower loads from its own shards when every other shard is gone; nothing else is held."""
    bare = tmp_path / "bare"
    bare.mkdir()
    kept = {path.name for path in tower_files(folder)}
    for path in folder.iterdir():
        if path.suffix != ".safetensors" or path.name in kept:
            (bare / path.name).write_bytes(path.read_bytes())
    assert len(list(bare.glob("*.safetensors"))) < len(list(folder.glob("*.safetensors")))

    tower = load(bare)

    index = json.loads((folder / "model.safetensors.index.json").read_bytes())
    wanted = {name for key in index["weight_map"] if (name := tower_name(key))}
    assert set(tower.parameter_names) == wanted


def test_older_names_of_weights_load(folder: Path, items: list[Item], tmp_path: Path) -> None:
    """Checkpoints with `model.` in front of names, or with `vision_model.` inside, give the same rows."""
    for change in (("vision_tower.", "vision_tower.vision_model."), ("", "model.")):
        other = tmp_path / change[1].strip(".")
        other.mkdir()
        for path in folder.glob("*.json"):
            if "index" not in path.name:
                (other / path.name).write_bytes(path.read_bytes())
        weights = {}
        for path in tower_files(folder):
            for key, tensor in load_file(path).items():
                if tower_name(key):
                    name = key if key.startswith(change[1]) else key.replace(change[0], change[1], 1)
                    weights[name] = tensor
        save_file(weights, other / "model.safetensors")
        assert torch.equal(encode(load(other), items[:1])[0], encode(load(folder), items[:1])[0])


def test_layout_of_another_shape_is_not_taken(folder: Path, items: list[Item]) -> None:
    """Pixels, geometry, rows and group must belong together, or the tower refuses the item before it runs."""
    tower = load(folder)
    _, layout = items[0]

    assert tower.takes(layout)
    for change in (
        {"rows": layout.rows + 1},
        {"forward_group": "other"},
        {"pixel_shape": (*layout.pixel_shape[:-1], layout.pixel_shape[-1] + 1)},
        {"geometry": (0, 0, 0)},
    ):
        values = {name: getattr(layout, name) for name in layout.__struct_fields__}
        assert not tower.takes(ItemLayout(**(values | change)))


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a LLaVA checkpoint."""
    made = tmp_path_factory.mktemp("model") / "llava"
    write_tower_checkpoint(made, "llava")
    return made


def test_options_of_size_are_refused_where_tiles_have_one(llava: Path) -> None:
    """A model of tiles refuses pixel bounds by name, videos and very thin pictures with their reason."""
    preparer = Preparer(llava, LIMITS)

    with pytest.raises(InvalidRequest) as failure:
        preparer.prepare(tower_pictures()[0], ItemOptions(max_pixels=50))

    assert failure.value.param == "mm_processor_kwargs"
    assert preparer.prepare(tower_pictures()[0], ItemOptions()).layout.metadata == {}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model_type": "bert"}, "'bert' is not served .served: qwen2_vl, .*gemma3"),
        ({"vision_config": {"model_type": "pixtral"}}, "a llava with a pixtral is not served"),
    ],
)
def test_model_that_is_not_served_is_named(
    llava: Path, tmp_path: Path, change: dict[str, object], text: str
) -> None:
    """A checkpoint of another kind ends the start-up of both processes with what is served."""
    for path in llava.glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((llava / "config.json").read_bytes()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))

    with pytest.raises(StartFailed, match=text):
        load(tmp_path)
    with pytest.raises(StartFailed, match=text):
        Preparer(tmp_path, LIMITS)


def test_tiles_of_another_size_end_the_start(llava: Path, tmp_path: Path) -> None:
    """An image processor whose tiles are not the tower's is found before the first request."""
    for path in llava.glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    facts = json.loads((llava / "preprocessor_config.json").read_bytes())
    facts |= {"size": {"shortest_edge": 70}, "crop_size": {"height": 70, "width": 70}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(facts))

    with pytest.raises(StartFailed, match=r"tiles are \[3, 70, 70\], the tower's \[3, 56, 56\]"):
        Preparer(tmp_path, LIMITS)


def test_video_of_a_model_of_tiles_is_refused(llava: Path) -> None:
    """A model that takes no videos says so."""
    from epdctl.worker.encode.options import VideoOptions

    with pytest.raises(UnsupportedMedia, match="takes no videos"):
        Preparer(llava, LIMITS).prepare(b"", VideoOptions())
