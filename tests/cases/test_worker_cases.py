"""Every handed case of a bundled worker, run against real workers and the real transfer engine.

The workers are shared: see `worker_pool`. Cases of the proxy are in `test_cases.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cases.judged import JUDGED
from tests.cases.loader import WORKER_TARGETS, Case, load_folder
from tests.cases.runner import run_steps
from tests.cases.test_cases import FOLDERS
from tests.cases.vocabulary import unknown_words
from tests.cases.worker_pool import WorkerPool
from tests.cases.worker_steps import WorkerSteps
from tests.cases.worker_world import WorkerWorld

pytestmark = [pytest.mark.e2e, pytest.mark.worker, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerPool]:
    """Return the workers of all cases; they end with the module."""
    workers = WorkerPool(tmp_path_factory.mktemp("workers"))
    yield workers
    workers.close()


def _parameters() -> list[object]:
    cases = [case for folder in FOLDERS for case in load_folder(folder)]
    chosen = [case for case in cases if case.target in WORKER_TARGETS and case.id not in JUDGED]
    marks = {True: [pytest.mark.full], False: []}
    return [pytest.param(case, id=case.id, marks=marks[case.nightly]) for case in chosen]


@pytest.mark.parametrize("case", _parameters())
async def test_case(case: Case, tmp_path: Path, pool: WorkerPool) -> None:
    """All expectations of a case hold against real workers."""
    assert not unknown_words(case), f"{case.id}: not in the vocabulary: {unknown_words(case)}"
    world = WorkerWorld(case, tmp_path, pool)
    failures = await run_steps(world, WorkerSteps(world))
    assert not failures, f"{case.id}: {case.raw.get('right')}\n" + "\n".join(failures)
