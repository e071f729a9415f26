"""Which questions mean the same, by their vectors alone."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane_server.caching.entries import DIGEST_BYTES
from fairlane_server.retrieval.embedder import FloatArray
from stream_processors.dispatcher.response_cache.semantic_match import encode_row, nearest


def response(number: int) -> bytes:
    return bytes([number]) * DIGEST_BYTES


def vector(*numbers: float) -> FloatArray:
    return np.array(numbers, dtype=np.float32)


def test_the_most_similar_comes_first_and_the_threshold_holds() -> None:
    rows = [
        encode_row(vector(1, 0, 0), response(1)),
        encode_row(vector(0.9, 0.1, 0), response(2)),
        encode_row(vector(0, 1, 0), response(3)),
        encode_row(vector(-1, 0, 0), response(4)),
    ]
    found = nearest(vector(2, 0, 0), rows, 0.9, 4)
    assert found is not None
    assert [one for _, one in found] == [response(1), response(2)]
    assert found[0][0] == pytest.approx(1.0, abs=1e-3)
    assert nearest(vector(1, 0, 0), rows, 0.9, 1) == found[:1]
    assert nearest(vector(0, 0, 1), rows, 0.9, 4) == []


def test_one_response_is_named_once() -> None:
    rows = [encode_row(vector(1, 0), response(1)), encode_row(vector(1, 0.01), response(1))]
    found = nearest(vector(1, 0), rows, 0.5, 4)
    assert found is not None
    assert len(found) == 1


def row(numbers: FloatArray, digest: bytes) -> bytes:
    return msgspec.msgpack.encode([digest, numbers.astype("<f2").tobytes()])


@pytest.mark.parametrize(
    "poison",
    [
        None,
        b"",
        b"garbage",
        row(vector(1, 0, 0), response(1)),
        row(vector(1), response(1)),
        row(vector(np.nan, 1), response(1)),
        row(vector(np.inf, 1), response(1)),
        row(vector(1, 0), b"short"),
        msgspec.msgpack.encode([response(1)]),
        msgspec.msgpack.encode([response(1), vector(1, 0).astype("<f2").tobytes(), b"more"]),
    ],
)
def test_a_row_that_is_none_is_passed_over(poison: bytes | None) -> None:
    assert nearest(vector(1, 0), [poison], 0.5, 4) is None
    good = encode_row(vector(1, 0), response(2))
    found = nearest(vector(1, 0), [poison, good, poison], 0.5, 4)
    assert found is not None
    assert [one for _, one in found] == [response(2)]


@given(st.lists(st.one_of(st.none(), st.binary(max_size=60)), max_size=6))
def test_any_bytes_are_passed_over(rows: list[bytes | None]) -> None:
    assert nearest(vector(1, 0), rows, 0.5, 4) in (None, [])


def test_vectors_that_are_like_no_other() -> None:
    for bad in (vector(0, 0), vector(np.nan, 1), vector(1e9, 0)):
        assert encode_row(bad, response(1)) is None
    rows = [encode_row(vector(1, 0), response(1))]
    for bad in (vector(0, 0), vector(np.nan, 1), vector(np.inf, 1), vector(np.inf, -np.inf)):
        assert nearest(bad, rows, 0.5, 4) == []
    assert nearest(vector(1, 0), [row(vector(0, 0), response(1))], 0.5, 4) == []
    found = nearest(vector(3e38, 0), rows, 0.5, 4)
    assert found is not None
    assert found[0][0] == pytest.approx(1.0, abs=1e-3)


def test_the_same_words_in_another_order_are_no_match() -> None:
    there, back, other = ((b"words", order) for order in (b"a to b", b"b to a", b"to b a"))
    rows = [encode_row(vector(1, 0), response(1), there), encode_row(vector(1, 0.01), response(2), (b"others", b"x"))]
    assert [one for _, one in nearest(vector(1, 0), rows, 0.9, 4, there) or ()] == [response(1), response(2)]
    for asked in (back, other):
        assert [one for _, one in nearest(vector(1, 0), rows, 0.9, 4, asked) or ()] == [response(2)]
