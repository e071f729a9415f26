"""Values of a body are counted before they are made."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producers.openai_api.body import has_too_many_values

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('",[]{}\\x'),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text('",[{\\y'), inner, max_size=5),
    max_leaves=30,
)


def values(value: Any) -> int:
    """Those within it, and the lists and objects, however empty."""
    if isinstance(value, dict):
        return 1 + sum(max(1, values(one)) for one in value.values())
    if isinstance(value, list):
        return 1 + sum(max(1, values(one)) for one in value)
    return 0


@given(JSON)
def test_a_text_is_refused_only_where_it_has_more(value: Any) -> None:
    raw = json.dumps(value).encode()
    # Of a list or an object, its own mark and one for each value but the first.
    assert not has_too_many_values(raw, 2 * values(value) + 1)


@pytest.mark.parametrize("piece", [b"{}", b"[]", b"1", b'""', b'"\\""', b'{"a":1}'])
def test_many_values_are_too_many(piece: bytes) -> None:
    assert has_too_many_values(b"[" + b",".join([piece] * 101) + b"]", 100)
    assert not has_too_many_values(b"[" + b",".join([piece] * 10) + b"]", 100)


def test_marks_in_a_text_are_no_values() -> None:
    text = json.dumps({"prompt": ',[{"\\' * 100_000}).encode()
    assert not has_too_many_values(text, 10)
