"""Embeddings in a shared folder: whole files or none, whoever else writes, whatever fails."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.numpy import load, load_file, save_file

from epdctl.errors import InvalidRequest, StorageFull, StorageUnavailable
from epdctl.worker.transfer import shared_folder
from epdctl.worker.transfer.digest import digest_of
from epdctl.worker.transfer.ec_file import FILE_NAME, StoredItem
from epdctl.worker.transfer.shared_folder import (
    STALE_AFTER_S,
    WORK_FOLDER,
    GivenUp,
    SharedFolder,
    this_machine,
)

pytestmark = [pytest.mark.unit, pytest.mark.worker]

numpy = pytest.importorskip("numpy")

MACHINE = "0123456789abcdef"
ROWS = numpy.arange(24, dtype=numpy.float32).reshape(6, 4)
NEVER = threading.Event()


def item_of(rows: numpy.ndarray = ROWS, identifier: str = "a_B-9") -> StoredItem:
    """Describe `rows`."""
    return StoredItem(
        identifier=identifier,
        shape=rows.shape,
        dtype=str(rows.dtype),
        nbytes=rows.nbytes,
        digest=digest_of(rows.tobytes()),
    )


def store(folder: SharedFolder, rows: numpy.ndarray = ROWS, identifier: str = "a_B-9") -> bool:
    """Store `rows`."""
    return folder.store(item_of(rows, identifier), memoryview(rows.tobytes()), NEVER)


def file_of(path: Path, identifier: str = "a_B-9") -> Path:
    """Return where a consumer looks."""
    return path / identifier / FILE_NAME


def parts(path: Path) -> list[str]:
    """Return the unfinished files."""
    return sorted(entry.name for entry in (path / WORK_FOLDER).iterdir())


@pytest.fixture
def folder(tmp_path: Path) -> SharedFolder:
    """Return an open folder."""
    opened = SharedFolder(tmp_path, machine=MACHINE)
    opened.open()
    return opened


def test_what_is_written_is_what_a_reader_of_safetensors_gets(folder: SharedFolder, tmp_path: Path) -> None:
    """One tensor `ec_cache` with shape, type and bytes, its digest beside it, and nothing unfinished left."""
    assert store(folder) is True

    loaded = load_file(file_of(tmp_path))
    assert list(loaded) == ["ec_cache"]
    assert loaded["ec_cache"].dtype == ROWS.dtype
    assert (loaded["ec_cache"] == ROWS).all()
    with safe_open(file_of(tmp_path), "numpy") as opened:
        assert opened.metadata() == {"digest": item_of().digest}
    assert parts(tmp_path) == []


@pytest.mark.parametrize(("name", "stored"), [("bfloat16", "BF16"), ("float16", "F16")])
def test_narrow_types_keep_their_names(folder: SharedFolder, tmp_path: Path, name: str, stored: str) -> None:
    """Types that numpy lacks are named as safetensors names them."""
    item = StoredItem(identifier="n", shape=(2, 3), dtype=name, nbytes=12, digest=None)
    folder.store(item, memoryview(b"x" * 12), NEVER)

    with safe_open(file_of(tmp_path, "n"), "numpy") as opened:
        assert opened.get_slice("ec_cache").get_dtype() == stored


def test_a_file_that_is_there_counts_as_delivered(folder: SharedFolder, tmp_path: Path) -> None:
    """A second delivery writes nothing and only renews the time stamp; so it is with a file of vLLM's."""
    store(folder)
    before = file_of(tmp_path).stat()
    os.utime(file_of(tmp_path), (1, 1))
    save_file({"ec_cache": ROWS}, _made(file_of(tmp_path, "theirs")))

    assert store(folder) is False
    assert store(folder, identifier="theirs") is False
    assert file_of(tmp_path).stat().st_ino == before.st_ino
    assert time.time() - file_of(tmp_path).stat().st_mtime < 60


def _made(place: Path) -> Path:
    place.parent.mkdir()
    return place


@pytest.mark.parametrize("damage", ["empty", "cut", "longer", "shape", "digest", "noise", "first", "last"])
def test_a_file_that_is_not_the_item_is_replaced(folder: SharedFolder, tmp_path: Path, damage: str) -> None:
    """A torn file, another shape, other rows under the same name: what a reader finds next is the item."""
    place = file_of(tmp_path)
    store(folder, ROWS.reshape(4, 6) if damage == "shape" else ROWS + 1 if damage == "digest" else ROWS)
    whole = place.read_bytes()
    first = len(whole) - ROWS.nbytes
    damaged = {
        "empty": b"",
        "cut": whole[:-1],
        "longer": whole + b"x",
        "noise": b"\xff" * 100,
        "first": _flipped(whole, first),
        "last": _flipped(whole, len(whole) - 1),
    }
    place.write_bytes(damaged.get(damage, whole))

    assert store(folder) is True
    assert (load_file(place)["ec_cache"] == ROWS).all()


def _flipped(data: bytes, place: int) -> bytes:
    """Return `data` with one byte turned over: the length stays, the rows are others."""
    return data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1 :]


def test_a_damaged_byte_far_into_a_large_file_is_found(folder: SharedFolder, tmp_path: Path) -> None:
    """All rows are read, however many: a file of several megabytes with one wrong byte is replaced once."""
    rows = numpy.arange(3 * 2**18, dtype=numpy.float32).reshape(-1, 64)
    store(folder, rows)
    place = file_of(tmp_path)
    place.write_bytes(_flipped(place.read_bytes(), 2_500_000))

    assert store(folder, rows) is True
    assert (load_file(place)["ec_cache"] == rows).all()
    assert store(folder, rows) is False


@pytest.mark.parametrize("name", ["", "..", "a/b", "a.b", "a b", "ä", "x" * 129, "a\n", "\0"])
def test_a_name_that_is_no_folder_is_refused(folder: SharedFolder, tmp_path: Path, name: str) -> None:
    """An identifier that could leave the folder, or that a file system refuses, writes nothing."""
    before = sorted(tmp_path.rglob("*"))

    with pytest.raises(InvalidRequest, match="A-Z a-z 0-9"):
        store(folder, identifier=name)

    assert sorted(tmp_path.rglob("*")) == before


def test_writers_of_one_item_do_not_disturb_each_other_nor_a_reader(tmp_path: Path) -> None:
    """Many writers replace one item again and again: a reader sees whole files only."""
    rows = [numpy.full((64, 1024), value, dtype=numpy.float32) for value in range(4)]
    folders = [SharedFolder(tmp_path, machine=MACHINE) for _ in rows]
    store(folders[0], rows[0])

    def write(number: int) -> int:
        return sum(store(folders[number], rows[(number + turn) % len(rows)]) for turn in range(8))

    reads = 0
    with ThreadPoolExecutor(len(rows)) as threads:
        writing = [threads.submit(write, number) for number in range(len(rows))]
        while not all(future.done() for future in writing):
            # Not mapped into memory: a file cut short under a map would end the tests, not fail one.
            seen = load(file_of(tmp_path).read_bytes())["ec_cache"]
            reads += 1
            assert seen.shape == (64, 1024)
            assert (seen == seen[0, 0]).all()
    assert sum(future.result() for future in writing) > 8
    assert reads > 0
    assert parts(tmp_path) == []


def test_a_write_that_is_given_up_leaves_nothing(folder: SharedFolder, tmp_path: Path) -> None:
    """Neither a file under the name nor an unfinished one."""
    gone = threading.Event()
    gone.set()

    with pytest.raises(GivenUp):
        folder.store(item_of(), memoryview(ROWS.tobytes()), gone)

    assert not file_of(tmp_path).exists()
    assert parts(tmp_path) == []


@contextmanager
def full_disk(path: Path) -> Iterator[Path]:
    """Give a file system of 256 KiB; without the right to mount one, a limit on the size of our files."""
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", path], capture_output=True, check=False
    )
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if mounted.returncode != 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (256 * 1024, limits[1]))
    try:
        yield path
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", path], check=True)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_fails_the_item_and_no_other(tmp_path: Path) -> None:
    """An item that does not fit is 507 `storage_full`, leaves nothing, and what fits is still taken."""
    large = numpy.zeros((128, 1024), dtype=numpy.float32)
    with full_disk(tmp_path / "small") as path:
        folder = SharedFolder(path, machine=MACHINE)
        folder.open()

        with pytest.raises(StorageFull, match="takes no more") as failure:
            store(folder, large, "large")
        with pytest.raises(StorageFull):
            folder.probe(large.nbytes)

        assert (failure.value.http_status, failure.value.code) == (507, "storage_full")
        assert str(path) not in failure.value.message
        assert parts(path) == []
        assert not file_of(path, "large").exists()
        assert store(folder, identifier="small") is True
        assert (load_file(file_of(path, "small"))["ec_cache"] == ROWS).all()


def test_a_folder_that_has_gone_is_not_made_anew(folder: SharedFolder, tmp_path: Path) -> None:
    """After an unmount nothing is written to where the file system was."""
    gone = tmp_path / "gone"
    gone.mkdir()
    unmounted = SharedFolder(gone, machine=MACHINE)
    unmounted.open()
    (gone / WORK_FOLDER).rmdir()
    gone.rmdir()

    with pytest.raises(StorageUnavailable, match="No such file"):
        store(unmounted)
    with pytest.raises(StorageUnavailable):
        unmounted.probe(8)

    assert not gone.exists()


def test_an_unwritable_folder_is_said_to_be_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the operating system refuses is 503 `storage_unavailable` with its reason."""

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "secret/path")

    folder = SharedFolder(tmp_path, machine=MACHINE)
    monkeypatch.setattr(shared_folder, "_make_folder", refuse)

    with pytest.raises(StorageUnavailable, match="Permission denied") as failure:
        folder.open()

    assert (failure.value.http_status, failure.value.code) == (503, "storage_unavailable")
    assert "secret" not in failure.value.message


def test_only_left_overs_of_dead_writers_are_removed(folder: SharedFolder, tmp_path: Path) -> None:
    """At the start goes what a dead process of this machine, or another machine long ago, left unfinished;
    what may still be written, and what is not ours, stays."""
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    work = tmp_path / WORK_FOLDER
    other, serial = "f" * 16, "0" * 16
    old = time.time() - STALE_AFTER_S - 60
    left = {
        f"{MACHINE}-{dead.pid}-{serial}.part": None,
        f"{other}-1-{serial}.part": old,
    }
    kept = {
        f"{MACHINE}-{os.getpid()}-{serial}.part": old,
        f"{other}-1-{'1' * 16}.part": None,
        "notes.txt": old,
        f"{MACHINE}-{dead.pid}-{serial}.part.txt": old,
    }
    for name, stamp in (left | kept).items():
        (work / name).write_bytes(b"x")
        if stamp is not None:
            os.utime(work / name, (stamp, stamp))
    store(folder)

    SharedFolder(tmp_path, machine=MACHINE).open()

    assert parts(tmp_path) == sorted(kept)
    assert file_of(tmp_path).exists()


def test_a_machine_has_one_name() -> None:
    """All processes of this machine write the same name into their files."""
    code = "from epdctl.worker.transfer.shared_folder import this_machine; print(this_machine())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert other.stdout.strip() == this_machine()
    assert len(this_machine()) == 16
