"""Claims about `--compile`: it is on, or the worker does not start."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from epdctl.errors import EncodeFailed
from epdctl.worker.encode.acceleration import Compile, CountingCompiler, accelerate
from epdctl.worker.encode.vision import Tower
from epdctl.worker.engine import StartFailed

pytestmark = [
    pytest.mark.unit,
    pytest.mark.worker,
    # Those of torch about itself, while it loads its compiler.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

MODELS = Path(__file__).parents[3] / "models" / "tiny-vlm"


class Layer(torch.nn.Module):
    """A module of a model's own: torch leaves its bare built-in ones uncompiled."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return new rows."""
        return self.linear(rows).relu()


class SmallTower:
    """One layer that can be compiled, unless its hook is broken."""

    def __init__(self, *, misspelt: bool = False) -> None:
        self._module = Layer()
        self._misspelt = misspelt

    def compile_with(self, backend: Compile) -> None:
        """Hook the compiler in, or set a name that nothing looks at."""
        if self._misspelt:
            self._module.complied_forward = backend
        else:
            self._module.compile(backend=backend, dynamic=True)

    def warm_up(self) -> None:
        """Run two forwards; failures are those of a tower."""
        try:
            with torch.inference_mode():
                self.rows = [self._module(torch.ones(count, 8)) for count in (1, 3)]
        except RuntimeError as error:
            raise EncodeFailed("the vision tower failed on this item") from error


def as_it_is(graph: Any, inputs: Sequence[Any]) -> Any:
    """Take a graph and run it uncompiled: what reaches a backend is what matters here."""
    return graph


def broken(graph: Any, inputs: Sequence[Any]) -> Any:
    """Fail as a compiler does that is not installed."""
    raise RuntimeError("no compiler")


def test_graphs_are_counted() -> None:
    """A tower whose graphs reach the compiler is active, and the count says so."""
    assert accelerate(SmallTower(), as_it_is).graphs >= 1


def test_asked_for_but_inactive_does_not_start() -> None:
    """Hazard 8: a hook that stays off without a word is a failure at start-up."""
    with pytest.raises(StartFailed, match="--compile: nothing of this tower was compiled"):
        accelerate(SmallTower(misspelt=True), as_it_is)


def test_a_compiler_that_fails_is_named() -> None:
    """Without a working compiler the worker does not start, and says what it takes."""
    with pytest.raises(StartFailed, match=r"--compile: .*C\+\+ compiler"):
        accelerate(SmallTower(), broken)


def test_inductor_compiles() -> None:
    """The real compiler makes code that computes the same."""
    tower = SmallTower()
    plain = tower._module(torch.ones(3, 8))

    assert accelerate(tower).graphs >= 1
    torch.testing.assert_close(tower.rows[1], plain)


def test_the_towers_own_hook_is_active() -> None:
    """Graphs of a served tower reach the compiler, and the names of its parameters stay."""
    tower = Tower.load(MODELS / "qwen2_5_vl", dtype="float32", device="cpu", threads=1)
    names = tower.parameter_names
    compiler = CountingCompiler(as_it_is)
    tower.compile_with(compiler)
    tower.self_test()

    assert compiler.graphs > 0
    assert tower.parameter_names == names


@pytest.mark.full
@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_a_compiled_tower_gives_the_same_rows(name: str) -> None:
    """With the real compiler rows differ by rounding only, for any size and any number of items."""
    tower = Tower.load(MODELS / name, dtype="float32", device="cpu", threads=1)
    items = [tower.blank(scale) for scale in (2, 4, 1)]
    torch.manual_seed(1)
    noise = [(torch.randn_like(pixels), layout) for pixels, layout in items]
    plain = [level.clone() for levels in tower.encode(noise).items for level in levels]

    assert accelerate(tower).graphs > 0
    again = [level for levels in tower.encode(noise).items for level in levels]
    torch.testing.assert_close(again, plain, atol=1e-4, rtol=1e-4)
