"""The pure parts of offline jobs: ids, lines, rows, budget, estimate, the ledger of open chunks."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.names import is_request_id
from fairlane.outcomes import Outcome, Task
from fairlane.records import InferenceReply
from fairlane_server.kafka.reply_partition import partition_of
from producers.backfill.__main__ import check_rows_under_way, defaults_of, format_of, pairs, window_ms
from producers.backfill.chunk_ledger import ChunkLedger
from producers.backfill.inputs import LineSplitter, Piece
from producers.backfill.job import (
    MOST_ROWS,
    BadRow,
    ChunkPlan,
    FileFormat,
    GoodRow,
    InputPosition,
    JobSpec,
    RowIds,
    affordable_rows,
)
from producers.backfill.rows import parse_row
from producers.backfill.submission import Estimate

JOBS = st.integers(0, 2**64 - 1).map(lambda number: f"{number:016x}")


@given(job_id=JOBS, row=st.integers(0, MOST_ROWS - 1), partitions=st.integers(1, 64))
def test_an_id_says_its_job_and_its_row_and_comes_to_the_jobs_partition(job_id: str, row: int, partitions: int) -> None:
    ids = RowIds(job_id, partitions)
    request_id = ids.id_of(row)

    assert is_request_id(request_id)
    assert request_id == RowIds(job_id, partitions).id_of(row)
    assert partition_of(request_id, partitions) == ids.partition
    assert ids.row_of(request_id) == row


@given(job_id=JOBS, other=JOBS, row=st.integers(0, MOST_ROWS - 1), salt=st.integers(0, 2**16 - 1))
def test_another_id_is_no_row_of_the_job(job_id: str, other: str, row: int, salt: int) -> None:
    ids = RowIds(job_id, 12)
    own = ids.id_of(row)
    forged = f"{own[:-4]}{salt:04x}"
    assert ids.row_of(forged) == (row if forged == own else None)
    assert other == job_id or ids.row_of(RowIds(other, 12).id_of(row)) is None
    for odd in ("", own[:-1], own.replace("-", "_"), own[:19] + "g" * 17):
        assert ids.row_of(odd) is None


def test_a_row_beyond_the_last_has_no_id() -> None:
    with pytest.raises(ValueError, match="not between"):
        RowIds("0" * 16, 12).id_of(MOST_ROWS)


@given(
    lines=st.lists(st.binary(max_size=30).filter(lambda line: b"\n" not in line), max_size=20),
    ends_with_newline=st.booleans(),
    cut=st.integers(1, 13),
    limit=st.integers(1, 40),
)
def test_lines_are_what_stands_between_newlines(
    lines: list[bytes], ends_with_newline: bool, cut: int, limit: int
) -> None:
    text = b"\n".join(lines) + (b"\n" if ends_with_newline and lines else b"")
    pieces = list(split(text, cut, LineSplitter(limit)))
    expected = text.split(b"\n")
    if expected[-1] == b"":
        expected.pop()

    assert [piece.content for piece in pieces] == [line if len(line) <= limit else None for line in expected]
    assert [piece.size_bytes for piece in pieces] == [len(line) for line in expected]
    for number, piece in enumerate(pieces):
        # From where a line ends the rest is read alike: a chunk may begin anywhere.
        rest = list(split(text[piece.end :], cut, LineSplitter(limit, piece.end)))
        assert rest == pieces[number + 1 :]


def test_newlines_between_quotes_are_part_of_a_record_of_csv() -> None:
    text = b'a,"one\ntwo",b\nc,"three ""four""\n",d\n'
    pieces = list(split(text, 5, LineSplitter(100, quoted=True)))
    assert [piece.content for piece in pieces] == [b'a,"one\ntwo",b', b'c,"three ""four""\n",d']


def test_a_quote_too_many_costs_one_record() -> None:
    text = b'a,"b\n' + b"x" * 30 + b"\nc,d\n"
    pieces = list(split(text, 7, LineSplitter(20, quoted=True)))
    assert [piece.content for piece in pieces] == [None, b"c,d"]


def split(text: bytes, cut: int, splitter: LineSplitter) -> Iterator[Piece]:
    for begin in range(0, len(text), cut):
        yield from splitter.feed(text[begin : begin + cut])
    last = splitter.last()
    if last is not None:
        yield last


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ({"prompt": "x"}, "model"),
        ({"model": "m"}, "messages"),
        ({"model": "m", "prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "messages"),
        ({"model": "m", "prompt": 5}, "prompt"),
        ({"model": "m", "messages": [{"role": "robot", "content": "x"}]}, "messages"),
        ({"model": "m", "messages": [{"role": "user"}]}, "messages.0.content"),
        ({"model": "m", "prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"model": "m", "prompt": "x", "max_tokens": "4"}, "max_tokens"),
        ({"model": "m", "prompt": "x", "colour": 1}, "colour"),
        ({"model": "m", "prompt": "x", "reply_to": "replies.globex"}, "reply_to"),
        ({"model": "m", "prompt": "x", "tenant": "globex"}, "tenant"),
        ({"model": "m", "texts": "one"}, "texts"),
        ({"model": "m", "image": "%%%"}, "image"),
        ({"model": "m", "prompt": "x", "priority": "urgent"}, "priority"),
        ({"custom_id": "c", "method": "POST", "url": "/v1/images", "body": {}}, "url"),
        ({"custom_id": "c", "method": "POST", "url": ["/v1/embeddings"], "body": {}}, "url"),
        ({"custom_id": "c", "method": "GET", "url": "/v1/embeddings", "body": {}}, "method"),
        ({"method": "POST", "url": "/v1/embeddings", "body": {}}, "custom_id"),
        ({"custom_id": "c", "method": "POST", "url": "/v1/embeddings", "body": []}, "body"),
        ({"custom_id": "c", "method": "POST", "url": "/v1/embeddings", "body": {"model": "m"}}, "body.input"),
        (
            {"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "stream": True}},
            "body.stream",
        ),
    ],
)
def test_a_bad_row_names_the_field_and_quotes_nothing(row: dict[str, object], field: str) -> None:
    found = parse_row(json.dumps(row).encode(), "acme", {})

    assert isinstance(found, BadRow)
    assert found.field == field
    assert found.reason


@pytest.mark.parametrize(
    "line", [b"", b"\xff\xfe", b"{", b'{"model": NaN}', b"5", b"[" * 100_000, b'{"prompt": "\\ud800"}', b"secret-text"]
)
def test_what_is_no_json_object_is_a_bad_row(line: bytes) -> None:
    found = parse_row(line, "acme", {})

    assert isinstance(found, BadRow)
    assert found.field in {"row", "model"}
    assert "secret" not in found.reason


@given(st.binary(max_size=60))
def test_no_line_raises(line: bytes) -> None:
    parse_row(line, "acme", {"model": "m"})


def test_a_row_of_a_batch_must_be_a_line_for_its_endpoint() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    line = {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": body}
    good = parse_row(json.dumps(line).encode(), "acme", {}, "/v1/chat/completions")
    assert isinstance(good, GoodRow)
    assert (good.row_id, good.url, good.request.priority) == ("c", "/v1/chat/completions", "low")
    for other in (json.dumps(line | {"url": "/v1/completions"}), '{"model": "m", "prompt": "x"}', "no json"):
        bad = parse_row(other.encode(), "acme", {}, "/v1/chat/completions")
        assert isinstance(bad, BadRow)
        assert bad.url == "/v1/chat/completions"


def test_a_row_goes_over_the_defaults_and_its_input_tells_its_task() -> None:
    defaults = {"model": "words", "max_tokens": 9, "priority": "normal"}
    found = parse_row(b'{"id": 7, "texts": ["a"], "model": "vectors"}', "acme", {"model": "words"})
    assert isinstance(found, GoodRow)
    assert (found.row_id, found.request.model, found.request.task) == ("7", "vectors", Task.EMBED)
    found = parse_row(b'{"prompt": "why?", "max_tokens": 3, "temperature": 1}', "acme", defaults)
    assert isinstance(found, GoodRow)
    assert (found.request.model, found.request.parameters.max_tokens, found.request.priority) == ("words", 3, "normal")


def test_columns_are_texts_that_become_what_their_fields_are() -> None:
    found = parse_row(
        {"model": "m", "messages": '[{"role": "user", "content": "hi"}]', "max_tokens": "4", "temperature": "0.5"},
        "acme",
        {},
    )
    assert isinstance(found, GoodRow)
    assert (found.request.parameters.max_tokens, found.request.parameters.temperature) == (4, 0.5)
    for wrong in ("not a list", "[" * 100_000):
        bad = parse_row({"model": "m", "texts": wrong}, "acme", {})
        assert isinstance(bad, BadRow)
        assert bad.field == "texts"


@given(
    limit=st.integers(0, 1_000),
    spent=st.integers(0, 1_000),
    done=st.integers(0, 100),
    open_rows=st.integers(0, 100),
    estimate=st.floats(0, 50),
)
def test_what_is_sent_is_expected_to_stay_within_the_budget(
    limit: int, spent: int, done: int, open_rows: int, estimate: float
) -> None:
    spent = spent if done else 0
    cost = spent / done if done else estimate
    rows = affordable_rows(limit, spent, cost, open_rows)

    if spent >= limit:
        assert rows == 0
    elif rows is None:
        assert cost <= 1e-6
    else:
        assert rows == 0 or spent + (open_rows + rows) * cost <= limit * (1 + 1e-9)
    assert affordable_rows(None, spent, cost, open_rows) is None


def test_an_estimate_is_made_from_some_rows_and_counts_all() -> None:
    estimate = Estimate()
    for number in range(5_000):
        row = b'{"model": "m", "prompt": "one two three", "max_tokens": 5}' if number % 2 else b"bad"
        estimate.add(partial(parse_row, row, "acme", {}))

    assert estimate.rows == 5_000
    assert 1_000 <= estimate.looked_at < 1_100
    assert estimate.cost_tokens == pytest.approx(2_500 * (3 + 2 * 5), rel=0.05)
    assert Estimate().cost_tokens == 0


def test_a_ledger_takes_one_reply_for_a_row_and_none_for_others() -> None:
    ids = RowIds("00000000000000ab", 12)
    ledger = ChunkLedger("acme", ids)
    good = parse_row(b'{"model": "m", "prompt": "x"}', "acme", {})
    plan = ChunkPlan(3, 10, 2, InputPosition(), InputPosition(0, 5), 77)
    ledger.open(plan, [good, BadRow("b", "row", "not JSON")])
    with pytest.raises(ValueError, match="open already"):
        ledger.open(plan, [])

    assert (ledger.chunks, ledger.open_rows) == (1, 2)
    assert not ledger.take(InferenceReply(ids.id_of(11), "acme", Outcome.OK), 0)
    assert not ledger.take(InferenceReply(ids.id_of(12), "acme", Outcome.OK), 0)
    assert not ledger.take(InferenceReply(ids.id_of(10), "globex", Outcome.OK), 0)
    assert ledger.complete() == []
    assert ledger.take(InferenceReply(ids.id_of(10), "acme", Outcome.OK), 0)
    assert not ledger.take(InferenceReply(ids.id_of(10), "acme", Outcome.FAILED, replayed=True), 0)
    assert ledger.complete() == [plan]
    assert [answer.outcome for answer in ledger.answers_of(3, ordered=True)] == [Outcome.OK, Outcome.REJECTED]
    ledger.close(3)
    assert ledger.chunks == 0


def test_a_specification_survives_being_stored() -> None:
    spec = JobSpec(
        "in.csv", "s3://b/out", FileFormat.CSV, FileFormat.PARQUET, columns={"a": "prompt"}, defaults={"seed": 1}
    )
    assert JobSpec.from_json(json.loads(json.dumps(asdict(spec) | {"of a later version": 1}))) == spec


def test_options() -> None:
    assert pairs("--column", ["q=prompt", "k=id"]) == {"q": "prompt", "k": "id"}
    assert defaults_of(["model=m", "max_tokens=4", 'stop=["a"]']) == {"model": "m", "max_tokens": 4, "stop": ["a"]}
    assert window_ms("90s") == 90_000
    assert window_ms("24h") == 86_400_000
    assert format_of("s3://b/x.PARQUET", FileFormat.JSONL) is FileFormat.PARQUET
    assert format_of("x", FileFormat.CSV) is FileFormat.CSV
    check_rows_under_way(2_500, 8)
    with pytest.raises(ValueError, match="at most 20000 rows may be under way"):
        check_rows_under_way(2_501, 8)
    assert defaults_of(["stop=" + "[" * 100_000]) == {"stop": "[" * 100_000}
    for wrong in ("q", "q=", "q=nothing"):
        with pytest.raises(ValueError, match="--column"):
            pairs("--column", [wrong])
    for wrong in ("", "5", "0s", "99d"):
        with pytest.raises(ValueError, match="--completion-window"):
            window_ms(wrong)
    with pytest.raises(ValueError, match="--default"):
        defaults_of(["nothing=1"])
