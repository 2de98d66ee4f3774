"""Socket folders: removed with their owner, and those of killed owners by the next start."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from epdctl.worker.socket_folder import PREFIX, YOUNG_S, SocketFolder, sweep

pytestmark = pytest.mark.unit

LATER = YOUNG_S + 1.0


def with_sockets(folder: Path) -> Path:
    """Put files in the place of sockets into `folder`."""
    for name in ("to-engine", "to-front"):
        (folder / name).touch()
    return folder


def dead(directory: Path) -> Path:
    """Return a folder as a killed owner leaves it."""
    code = "import os, sys, pathlib; from epdctl.worker.socket_folder import SocketFolder as F; "
    code += "print(F(pathlib.Path(sys.argv[1])).path, flush=True); os.kill(os.getpid(), 9)"
    ended = subprocess.run(
        [sys.executable, "-c", code, directory], check=False, capture_output=True, text=True
    )
    assert ended.returncode == -9
    return with_sockets(Path(ended.stdout.strip()))


def test_an_owner_takes_its_folder_along(tmp_path: Path) -> None:
    """Closing removes the files and the folder, this user's alone until then; a second time does nothing."""
    folder = SocketFolder(tmp_path)
    with_sockets(folder.path)
    mode = folder.path.stat().st_mode & 0o777

    folder.close()
    folder.close()

    assert (mode, list(tmp_path.iterdir())) == (0o700, [])


def test_the_dead_are_swept_and_nobody_else(tmp_path: Path) -> None:
    """kill -9 leaves a folder, which a later start removes; one whose owner lives stays, however old."""
    left, living = dead(tmp_path), SocketFolder(tmp_path)
    with_sockets(living.path)
    now = time.time()

    young = sweep(tmp_path, now=now)
    old = sweep(tmp_path, now=now + LATER)

    assert (young, old, left.exists()) == (0, 1, False)
    assert sorted(path.name for path in living.path.iterdir()) == ["to-engine", "to-front"]
    living.close()
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    """Folders with other names or other files in them stay, and so do a file and a link with our name."""
    (tmp_path / "epdctl-results").mkdir()
    with_sockets(tmp_path / "epdctl-results")
    (dead(tmp_path) / "notes").write_text("mine")
    (tmp_path / f"{PREFIX}file").touch()
    (tmp_path / f"{PREFIX}link").symlink_to(tmp_path / "epdctl-results")

    removed = sweep(tmp_path, now=time.time() + LATER)

    assert removed == 0
    assert len(list(tmp_path.iterdir())) == 4
    assert len(list((tmp_path / "epdctl-results").iterdir())) == 2
    assert [path.read_text() for path in tmp_path.glob("*/notes")] == ["mine"]


def test_a_folder_that_is_not_there_is_no_failure(tmp_path: Path) -> None:
    """A temporary folder that cannot be read ends no start."""
    assert sweep(tmp_path / "missing", now=time.time()) == 0
