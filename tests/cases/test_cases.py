"""Every case file of the proxy, run against the real process with stub instances.

Cases of the bundled workers are in `test_worker_cases.py`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cases.judged import JUDGED
from tests.cases.loader import DATA_FOLDER, OWN_FOLDER, PROXY_TARGETS, WORKER_TARGETS, Case, load_folder
from tests.cases.runner import run_case

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(150)]

_GIVEN = os.environ.get("EPDCTL_CASES_DIR")
FOLDERS = (Path(_GIVEN),) if _GIVEN else (DATA_FOLDER, OWN_FOLDER)


def _parameters() -> list[object]:
    cases = [case for folder in FOLDERS for case in load_folder(folder)]
    chosen = [case for case in cases if case.target not in WORKER_TARGETS and case.id not in JUDGED]
    return [pytest.param(case, id=case.id, marks=_marks(case)) for case in chosen]


def _marks(case: Case) -> list[pytest.MarkDecorator]:
    marks = [pytest.mark.full] if case.nightly else []
    return [*marks, pytest.mark.worker] if "worker" in case.target else marks


@pytest.mark.parametrize("case", _parameters())
async def test_case(case: Case, tmp_path: Path) -> None:
    """All expectations of a case hold against the real proxy."""
    assert case.target in PROXY_TARGETS, f"{case.id}: unknown target {case.target!r}"
    failures = await run_case(case, tmp_path)
    assert not failures, f"{case.id}: {case.raw.get('right')}\n" + "\n".join(failures)
