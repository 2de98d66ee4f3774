"""Reading media from files: only what lies in the configured folder."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

import pytest

from epdctl.errors import InvalidRequest, MediaUnavailable
from epdctl.worker.media import read_local_file

pytestmark = [pytest.mark.unit, pytest.mark.worker]


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """Return a folder that may be read, beside one that may not."""
    root = tmp_path / "shared"
    (root / "in").mkdir(parents=True)
    (root / "in" / "a b.png").write_bytes(b"picture")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "key").write_bytes(b"secret")
    (root / "link-in").symlink_to(root / "in" / "a b.png")
    (root / "link-out").symlink_to(tmp_path / "outside" / "key")
    (root / "dir-out").symlink_to(tmp_path / "outside")
    (root / "link-to-device").symlink_to("/dev/zero")
    os.mkfifo(root / "pipe")
    # Bound by a short name: a socket's path may have 107 characters at most.
    with socket.socket(socket.AF_UNIX) as server, contextlib.chdir(root):
        server.bind("socket")
    return root


@pytest.mark.parametrize("name", ["in/a%20b.png", "link-in", "in/../link-in"])
@pytest.mark.parametrize("start", ["file://", "file://localhost"])
def test_file_under_the_folder_is_read(shared: Path, name: str, start: str) -> None:
    """Files under the folder may be read, through links that stay inside too."""
    assert read_local_file(f"{start}{shared}/{name}", shared, 1000) == b"picture"


@pytest.mark.parametrize(
    "name",
    [
        "link-out",
        "dir-out/key",
        "../outside/key",
        "in/%2e%2e/%2e%2e/outside/key",
        "in/%252e%252e/%252e%252e/outside/key",
        "..%2foutside%2fkey",
        "missing",
        "in",
        "pipe",
        "link-to-device",
        "socket",
    ],
)
def test_file_outside_the_folder_is_refused(shared: Path, name: str) -> None:
    """Links and dots that lead out, folders and pipes are refused, and all refusals read the same."""
    with pytest.raises(MediaUnavailable) as failure:
        read_local_file(f"file://{shared}/{name}", shared, 1000)

    expected = "the file URL names no readable file under --allowed-local-media-path"
    assert failure.value.message == expected


@pytest.mark.parametrize("name", ["zero", "null", "fd/0"])
def test_device_is_no_file(name: str) -> None:
    """Devices are refused where the folder itself is full of them."""
    with pytest.raises(MediaUnavailable, match="no readable file"):
        read_local_file(f"file:///dev/{name}", Path("/dev"), 1000)


def test_neighbour_with_the_folders_name_is_outside(shared: Path) -> None:
    """A folder whose name begins like the allowed one's is another folder."""
    other = shared.with_name("shared-not")
    other.mkdir()
    (other / "key").write_bytes(b"secret")

    with pytest.raises(MediaUnavailable, match="no readable file"):
        read_local_file(f"file://{other}/key", shared, 1000)


def test_files_are_refused_without_a_folder(shared: Path) -> None:
    """Unless a folder is configured no file may be read."""
    with pytest.raises(MediaUnavailable, match="--allowed-local-media-path"):
        read_local_file(f"file://{shared}/link-in", None, 1000)


@pytest.mark.parametrize("url", ["file://host/x", "file:x", "file:///x?y=1", "file:///a%00b"])
def test_malformed_file_url_is_refused(shared: Path, url: str) -> None:
    """File URLs with a host, a query, or no absolute path are malformed."""
    with pytest.raises(InvalidRequest):
        read_local_file(url, shared, 1000)


def test_file_larger_than_the_limit_is_refused(shared: Path) -> None:
    """The size limit holds for files too."""
    with pytest.raises(MediaUnavailable, match="larger than 3 bytes"):
        read_local_file(f"file://{shared}/link-in", shared, 3)
