"""What of a record's headers goes on as its trace."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane import headers
from fairlane.trace_context import trace_headers
from tests.kit.cpu_time import cpu_time

PARENT = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
STATE = b"congo=t61rcWkgMzE,rojo@eu=00f067aa0ba902b7"


def test_parent_and_state_go_on_and_nothing_else() -> None:
    given_headers = [("baggage", b"user=secret"), (headers.TRACE_STATE, STATE), (headers.TRACE_PARENT, PARENT)]
    expected = ((headers.TRACE_PARENT, PARENT), (headers.TRACE_STATE, STATE))
    assert trace_headers(given_headers) == expected
    assert trace_headers(dict(given_headers)) == expected
    assert trace_headers(expected) == expected
    assert trace_headers(None) == trace_headers([]) == ()


@pytest.mark.parametrize(
    "parent",
    [
        b"",
        b"00-1-2-01",
        PARENT.upper(),
        PARENT + b"-more",
        b"ff" + PARENT[2:],
        b"00-" + b"0" * 32 + PARENT[35:],
        PARENT[:36] + b"0" * 16 + b"-01",
        b" " + PARENT,
        PARENT + b"\n",
        "text" * 100_000,
        None,
    ],
)
def test_what_is_no_trace_parent_takes_its_state_along(parent: object) -> None:
    assert trace_headers([(headers.TRACE_PARENT, parent), (headers.TRACE_STATE, STATE)]) == ()


@pytest.mark.parametrize(
    "state",
    [
        b"",
        b"a" * 513,
        b"a=1," * 128 + b"b=2",
        b"a=1\nb=2",
        b"no value",
        b"A=1",
        b"a=\xff",
        ",".join(["a=1"] * 33).encode(),
    ],
)
def test_a_state_that_is_not_well_formed_is_left_out(state: bytes) -> None:
    assert trace_headers([(headers.TRACE_PARENT, PARENT), (headers.TRACE_STATE, state)]) == (
        (headers.TRACE_PARENT, PARENT),
    )


@pytest.mark.parametrize("state", [b"a=1 , \tb=2\t", b" ,,a=1", b"a=b c", b" " * 512])
def test_white_space_around_members_and_empty_ones_are_well_formed(state: bytes) -> None:
    assert trace_headers([(headers.TRACE_PARENT, PARENT), (headers.TRACE_STATE, state)])[1:] == (
        (headers.TRACE_STATE, state),
    )


@pytest.mark.parametrize("state", [b" " * 511 + b"\0", b"\t" * 511 + b"=", b"a=" + b" " * 509 + b"\0", b"a" * 512])
def test_a_state_takes_little_time_however_it_is_made_up(state: bytes) -> None:
    given_headers = [(headers.TRACE_PARENT, PARENT), (headers.TRACE_STATE, state)]
    with cpu_time() as time:
        for _ in range(500):
            assert len(trace_headers(given_headers)) == 1
    assert time.spent_s < 0.25


def test_of_a_name_that_comes_twice_the_last_counts() -> None:
    assert trace_headers([(headers.TRACE_PARENT, b"x"), (headers.TRACE_PARENT, PARENT)]) != ()
    assert trace_headers([(headers.TRACE_PARENT, PARENT), (headers.TRACE_PARENT, b"x")]) == ()


_VALUES = st.one_of(st.binary(max_size=600), st.just(PARENT), st.just(STATE), st.none(), st.text(max_size=5))
_NAMES = st.sampled_from([headers.TRACE_PARENT, headers.TRACE_STATE, "baggage", "ce_id"])


@given(st.lists(st.tuples(_NAMES, _VALUES), max_size=8))
def test_whatever_is_given_at_most_two_short_headers_go_on(given_headers: list[tuple[str, object]]) -> None:
    found = trace_headers(given_headers)
    assert [name for name, _ in found] in ([], [headers.TRACE_PARENT], [headers.TRACE_PARENT, headers.TRACE_STATE])
    assert sum(len(value) for _, value in found) <= 55 + 512
    assert all(value.isascii() and value.decode().isprintable() for _, value in found)
    assert trace_headers(found) == found
