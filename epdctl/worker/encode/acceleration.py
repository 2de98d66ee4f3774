"""`--compile`: torch.compile for a tower, and the proof that it is on.

Rules of this file: what was asked for and is not active is a failure at start-up, never a slower worker that
says nothing. Active means that the compiler was given graphs of this tower and made code of them; the count
of graphs is kept, since another shape of input may bring another one later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from epdctl.errors import EncodeFailed
from epdctl.worker.engine import StartFailed

Compile = Callable[[Any, Sequence[Any]], Any]
_WITHOUT = "Leave --compile out to run without it"


class Compilable(Protocol):
    """What a tower offers for it."""

    def compile_with(self, backend: Compile) -> None:
        """Hand the tower's graphs to `backend` from the next forward on."""
        ...

    def warm_up(self) -> None:
        """Run forwards of different sizes; raises EncodeFailed."""
        ...


class CountingCompiler:
    """A backend of torch.compile that counts the graphs it has made code of."""

    def __init__(self, compile_graph: Compile) -> None:
        self._compile_graph = compile_graph
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Sequence[Any]) -> Any:
        """Compile one graph; raises what the compiler raises."""
        compiled = self._compile_graph(graph, inputs)
        self.graphs += 1
        return compiled


def accelerate(tower: Compilable, compile_graph: Compile | None = None) -> CountingCompiler:
    """Compile `tower` (by Inductor unless told otherwise) and return the counter, which is not zero.

    Raises:
        StartFailed: it cannot be compiled here, or nothing was compiled.
    """
    compiler = CountingCompiler(compile_graph or _inductor())
    tower.compile_with(compiler)
    try:
        tower.warm_up()
    except EncodeFailed as error:
        cause = type(error.__cause__ or error).__name__
        raise StartFailed(
            f"--compile: the tower cannot be compiled here ({cause}): it takes a C++ compiler on the CPU,"
            f" Triton on CUDA. {_WITHOUT}"
        ) from error
    if compiler.graphs == 0:
        raise StartFailed(
            "--compile: nothing of this tower was compiled. Leave --compile out to run without it"
        )
    return compiler


def _inductor() -> Compile:
    from torch._inductor.compile_fx import compile_fx

    return compile_fx
