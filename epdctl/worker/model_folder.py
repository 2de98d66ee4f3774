"""What is wrong with a model's folder, in words.

Rules of this file: looks at names and JSON only.
"""

from __future__ import annotations

import json
from pathlib import Path


def unreadable_config(folder: Path, error: Exception) -> str:
    """Return why transformers raised `error` over the configuration in `folder`, which it does not say."""
    path = folder / "config.json"
    if not path.is_file():
        return f"{folder}: there is no config.json, so this is no model's folder"
    try:
        config = json.loads(path.read_bytes())
    except OSError as denied:
        return f"{folder}: config.json cannot be read ({denied.strerror})"
    except ValueError:
        return f"{folder}: config.json is no JSON"
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        return f"{folder}: config.json names no model_type"
    return f"{folder}: config.json is of no model that is known here, or not whole ({type(error).__name__})"
