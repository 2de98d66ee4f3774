"""Without the worker extra the modules that import torch are not even collected."""

from __future__ import annotations

from importlib.util import find_spec

NEED_TORCH = ["test_model.py", "test_sampling.py", "test_loop.py", "random_model.py"]
collect_ignore = [] if find_spec("torch") else NEED_TORCH
