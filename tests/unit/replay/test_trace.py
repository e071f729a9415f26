"""Traces as they are found, and what is due when."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producers.replay.trace import Call, PlanOptions, TraceError, TraceRow, plan, read_trace, text_of, tokens_of

_HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def test_both_forms_of_the_published_traces_are_read() -> None:
    seven_digits = [_HEAD, "2023-11-16 18:17:03.9799600,4808,10\n", "2023-11-16 18:17:04.0319600,3180,8\n"]
    with_zone = [_HEAD, "2024-05-10 00:00:00.009930+00:00,2162,5\n", "2024-05-10 00:00:01+00:00,2399,6\n"]

    assert [row.context_tokens for row in read_trace(seven_digits, "t.csv")] == [4_808, 3_180]
    assert [row.arrived_at_s for row in read_trace(seven_digits, "t.csv")] == pytest.approx([0, 0.052], abs=1e-5)
    assert [row.arrived_at_s for row in read_trace(with_zone, "t.csv")] == pytest.approx([0, 0.99007], abs=1e-5)


def test_a_trace_under_plain_names_may_say_whose_requests_they_are() -> None:
    lines = ["tenant,arrived_at_s,prompt_tokens,output_tokens\n", "acme,10,5,6\n", "\n", "globex,12.5,7,8\n"]

    assert list(read_trace(lines, "t.csv")) == [TraceRow(0.0, 5, 6, "acme"), TraceRow(2.5, 7, 8, "globex")]


def test_a_trace_is_read_as_it_is_needed() -> None:
    def endless() -> object:
        yield _HEAD
        number = 0
        while True:
            yield f"{number},1,1\n"
            number += 1

    rows = read_trace(endless(), "t.csv")  # type: ignore[arg-type]  # a generator of lines without an end
    assert [next(rows).arrived_at_s for _ in range(3)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "line 1: the file is empty"),
        (["TIMESTAMP,GeneratedTokens\n"], "line 1: no column is called contexttokens or prompt_tokens"),
        ([_HEAD, "1,2\n"], "line 2: 2 columns, and the first line has 3"),
        ([_HEAD, "noon,2,3\n"], "line 2, column timestamp: neither seconds nor a date and time of ISO 8601"),
        ([_HEAD, "1,2,3\n", "2,-1,3\n"], "line 3, column contexttokens: not a number of tokens"),
        ([_HEAD, "1,2,99999999999\n"], "line 2, column generatedtokens: not a number of tokens"),
        ([_HEAD, "5,2,3\n", "4,2,3\n"], "line 3, column timestamp: earlier than the line above it"),
        ([_HEAD, "5,2,3\n", "6,2\r,3\n"], "line 3: new-line character seen in unquoted field"),
        ([_HEAD, "5,2,3\n", '6,2,"3\n', *["7,2,3\n"] * 40_000], "line 3: field larger than field limit"),
        ([_HEAD, '5,"2\nand",3\n'], "line 2, column contexttokens: not a number of tokens"),
    ],
)
def test_what_is_no_trace_is_told_by_its_line(lines: list[str], message: str) -> None:
    with pytest.raises(TraceError, match=f"^t.csv: {message}"):
        list(read_trace(lines, "t.csv"))


_ROWS = st.lists(
    st.builds(
        TraceRow,
        st.floats(0, 1_000),
        st.integers(0, 10_000),
        st.integers(0, 10_000),
        st.sampled_from(("", "acme", "globex", "x", "y")),
    ),
    max_size=40,
).map(lambda rows: sorted(rows, key=lambda row: row.arrived_at_s))


@given(_ROWS, st.floats(0.01, 100), st.floats(1, 500), st.integers(1, 30))
def test_a_plan_keeps_the_order_the_factor_and_the_bounds(
    rows: list[TraceRow], factor: float, seconds: float, most: int
) -> None:
    options = PlanOptions(factor, seconds, most, scale=0.5, max_tokens=100)
    calls = list(plan(rows, ("acme", "globex"), options))

    assert [call.number for call in calls] == list(range(len(calls)))
    assert [call.due_s for call in calls] == [row.arrived_at_s / factor for row in rows[: len(calls)]]
    assert len(calls) == min(most, sum(row.arrived_at_s / factor < seconds for row in rows))
    for call, row in zip(calls, rows, strict=False):
        assert call.prompt_tokens >= 1
        assert call.output_tokens >= 1
        assert call.prompt_tokens + call.output_tokens <= 100
        assert row.tenant not in ("acme", "globex") or call.tenant == row.tenant


def test_strangers_stay_together_and_the_nameless_go_round() -> None:
    options = PlanOptions()
    strangers = [TraceRow(0, 1, 1, name) for name in "abcdefgh" * 3]
    by_name = {(row.tenant, call.tenant) for row, call in zip(strangers, plan(strangers, "xy", options), strict=True)}
    nameless = plan([TraceRow(0, 1, 1)] * 6, "xyz", options)

    assert len(by_name) == 8
    assert {tenant for _, tenant in by_name} == {"x", "y"}
    assert Counter(call.tenant for call in nameless) == {"x": 2, "y": 2, "z": 2}


def test_an_answer_gives_way_to_its_prompt() -> None:
    assert tokens_of(TraceRow(0, 90, 90), PlanOptions(max_tokens=100)) == (90, 10)
    assert tokens_of(TraceRow(0, 200, 5), PlanOptions(max_tokens=100)) == (99, 1)
    assert tokens_of(TraceRow(0, 0, 0), PlanOptions()) == (1, 1)


@pytest.mark.parametrize(
    "options", [{"factor": 0.0}, {"factor": float("nan")}, {"scale": -1.0}, {"max_tokens": 1}], ids=str
)
def test_a_plan_that_cannot_be_is_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        PlanOptions(**options)  # type: ignore[arg-type]  # one wrong value at a time
    with pytest.raises(ValueError, match="tenants"):
        next(plan([TraceRow(0, 1, 1)], (), PlanOptions()))


@given(st.integers(0, 10**9), st.integers(1, 3_000))
def test_a_text_has_as_many_tokens_as_asked(number: int, tokens: int) -> None:
    assert len(text_of(number, tokens).encode()) == 4 * tokens


def test_no_two_calls_ask_the_same() -> None:
    assert len({text_of(call.number, 8) for call in (Call(number, 0, "a", 8, 1) for number in range(1_000))}) == 1_000
