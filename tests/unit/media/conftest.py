"""These tests need the worker extra; without it they are not collected."""

from importlib.util import find_spec

HAS_WORKER_EXTRA = all(find_spec(name) is not None for name in ("pybase64", "PIL"))
collect_ignore = (
    [] if HAS_WORKER_EXTRA else ["test_media_fetch.py", "test_media_local_files.py", "test_picture.py"]
)
