"""Claims about which field an admin error names."""

from __future__ import annotations

import pytest

from epdctl.errors import SchemaViolation
from epdctl.registry.forms import parse_registration

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b'{"role": "encode"}', "url"),
        (b'{"role": "x", "url": "http://h:1"}', "role"),
        (b'{"role": "encode", "url": 5}', "url"),
        (b'{"role": "encode", "url": "http://h:1", "foo": 1}', "foo"),
        (b'{"role": "encode", "url": "http://h:1", "dp_size": "2"}', "dp_size"),
        (b'{"role": "encode", "url": "http://h:1", "labels": {"a": 1}}', "labels"),
        (b"[]", None),
    ],
)
def test_a_schema_violation_names_its_field(body: bytes, field: str | None) -> None:
    """`param` is the field that is missing, unknown or of the wrong type; None when the whole body is."""
    with pytest.raises(SchemaViolation) as refused:
        parse_registration(body)

    assert refused.value.param == field
