"""Claims about what counts as the expected tensor (hazards 6 and 44)."""

from __future__ import annotations

import pytest

from epdctl.worker.transfer.ports import TensorSpec
from epdctl.worker.transfer.tensors import check_expectation

pytestmark = pytest.mark.unit

EXPECTED = TensorSpec((6, 64), "bfloat16")


def test_the_expected_tensor_is_taken() -> None:
    """The same shape and dtype are no difference."""
    assert check_expectation(TensorSpec((6, 64), "bfloat16"), EXPECTED) is None


@pytest.mark.parametrize(
    ("actual", "said"),
    [
        (TensorSpec((3, 64), "bfloat16"), "[3, 64] where [6, 64] is expected"),
        (TensorSpec((6, 32), "bfloat16"), "[6, 32] where [6, 64] is expected"),
        (TensorSpec((384,), "bfloat16"), "[384] where [6, 64] is expected"),
        (TensorSpec((6, 64), "float16"), "float16 where bfloat16 is expected"),
        (TensorSpec((3, 7), "float32"), "float32 where bfloat16 is expected"),
    ],
)
def test_any_other_is_named(actual: TensorSpec, said: str) -> None:
    """Other rows, another width, another dtype: each is told with both values."""
    difference = check_expectation(actual, EXPECTED)

    assert difference is not None
    assert said in difference
