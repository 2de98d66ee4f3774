"""Whether an item is what it says it is, and what this consumer's model takes.

Rules of this file: plain arithmetic on shapes (elements), dtypes (torch names without prefix) and bytes. A
size is checked before anything is allocated for it: vLLM 0.33.0 allocates first and leaks on a bad shape.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from epdctl.ec.protocol import Refusal, RefusalCode, ReserveItem
from epdctl.worker.transfer.ports import TensorSpec

ITEM_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "float32": 4,
    "int64": 8,
    "float64": 8,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorContract:
    """What the consumer's model reads: one dtype, and rows of one of these widths (empty: any)."""

    dtype: str
    widths: frozenset[int] = frozenset()


def nbytes_of(spec: TensorSpec) -> int:
    """Return the bytes of a contiguous tensor; raise KeyError for a dtype that is not known."""
    return math.prod(spec.shape) * ITEM_BYTES[spec.dtype]


def check_item(item: ReserveItem, contract: TensorContract | None) -> Refusal | None:
    """Return why the item cannot be taken, or None: its arithmetic first, then the model's contract."""
    if item.dtype not in ITEM_BYTES:
        return Refusal(f"unsupported dtype '{item.dtype}'", RefusalCode.INVALID)
    if nbytes_of(TensorSpec(item.shape, item.dtype)) != item.nbytes:
        return Refusal("shape and dtype do not match nbytes", RefusalCode.INVALID)
    return None if contract is None else _check_contract(item, contract)


def check_expectation(actual: TensorSpec, expected: TensorSpec) -> str | None:
    """Return how an item differs from what a request expects, or None."""
    if actual.dtype != expected.dtype:
        return f"the embedding is {actual.dtype} where {expected.dtype} is expected"
    if actual.shape != expected.shape:
        return f"the embedding is {list(actual.shape)} where {list(expected.shape)} is expected"
    return None


def _check_contract(item: ReserveItem, contract: TensorContract) -> Refusal | None:
    if item.dtype != contract.dtype:
        return Refusal(
            f"this consumer takes {contract.dtype}, the item is {item.dtype}: run both with the same --dtype",
            RefusalCode.CONTRACT,
        )
    if len(item.shape) != 2:
        return Refusal(f"an item is [rows, width], got {list(item.shape)}", RefusalCode.CONTRACT)
    if contract.widths and item.shape[1] not in contract.widths:
        widths = ", ".join(map(str, sorted(contract.widths)))
        return Refusal(
            f"this consumer takes rows of width {widths}, the item's are {item.shape[1]}: run the same model",
            RefusalCode.CONTRACT,
        )
    return None
