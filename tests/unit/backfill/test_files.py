"""Inputs from any place on, and outputs that are whole or not there; files and S3 alike."""

import csv
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fairlane.outcomes import Outcome
from producers.backfill import outputs
from producers.backfill.answers import RowAnswer
from producers.backfill.errors import InputChangedError, JobFailedError, NoSuchInputError
from producers.backfill.files import absolute, are_same, blob_of, blocks_of
from producers.backfill.inputs import RowSource, source_of
from producers.backfill.job import MEBIBYTE, BadRow, FileFormat, Fingerprint, InputPosition, Job, JobSpec, RowContent
from producers.backfill.outputs import FileParts
from producers.backfill.submission import TooExpensiveError, survey
from tests.kit.s3_storage import s3_storage

BUCKET = "batches"


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """The endpoint of a storage that speaks S3."""
    with s3_storage(BUCKET) as endpoint:
        yield endpoint


@pytest.fixture(params=["file", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str | None]:
    """Where files can be, and the endpoint of it."""
    if request.param == "file":
        return str(tmp_path), None
    return f"s3://{BUCKET}/{uuid4()}", request.getfixturevalue("s3")


def read_all(source: RowSource, most_rows: int) -> list[tuple[RowContent, InputPosition]]:
    """Every row, and where the chunk that it is in begins."""
    position = InputPosition()
    found: list[tuple[RowContent, InputPosition]] = []
    while True:
        rows, end = source.read(position, most_rows, 2**40)
        if not rows:
            return found
        found += [(row, position) for row in rows]
        position = end


def write_input(url: str, endpoint: str | None, format_: FileFormat, folder: Path) -> JobSpec:
    """Fifty rows, in blocks or row groups that no chunk has."""
    spec = JobSpec(url, "out", format_, endpoint=endpoint)
    match format_:
        case FileFormat.JSONL:
            content = b"".join(b'{"id": "r%d"}\n\n' % number for number in range(50))
        case FileFormat.CSV:
            content = b"\xef\xbb\xbfid,prompt\r\n" + b"".join(b'r%d,"a\nb"\r\n' % number for number in range(50))
        case FileFormat.PARQUET:
            made = folder / "made.parquet"
            rows = [{"id": f"r{number}", "prompt": "x"} for number in range(50)]
            pq.write_table(pa.Table.from_pylist(rows), made, row_group_size=13)
            content = made.read_bytes()
    blob_of(url, endpoint).write([content])
    return spec


@pytest.mark.parametrize("format_", list(FileFormat))
def test_rows_are_the_same_from_wherever_they_are_read(
    place: tuple[str, str | None], format_: FileFormat, tmp_path: Path
) -> None:
    folder, endpoint = place
    url = f"{folder}/in.{format_}"
    spec = write_input(url, endpoint, format_, tmp_path)
    fingerprint = blob_of(url, endpoint).fingerprint()
    source = source_of(blob_of(url, endpoint), fingerprint, spec)
    found = read_all(source, 7)
    source.close()

    assert len(found) == 50
    rows = [row for row, _ in found]
    ids = [
        json.loads(row)["id"] if isinstance(row, bytes) else row["id"] for row in rows if not isinstance(row, BadRow)
    ]
    assert ids == [f"r{number}" for number in range(50)]
    for begin in {position for _, position in found}:
        again = source_of(blob_of(url, endpoint), fingerprint, spec)
        contents, _ = again.read(begin, 7, 2**40)
        again.close()
        assert contents == [row for row, position in found if position == begin]


@pytest.mark.parametrize("format_", list(FileFormat))
def test_an_input_that_is_gone_stops_nobody_who_need_not_read_it(
    place: tuple[str, str | None], format_: FileFormat, tmp_path: Path
) -> None:
    folder, endpoint = place
    url = f"{folder}/in.{format_}"
    spec = write_input(url, endpoint, format_, tmp_path)
    fingerprint = blob_of(url, endpoint).fingerprint()
    blob_of(url, endpoint).delete()

    source = source_of(blob_of(url, endpoint), fingerprint, spec)

    with pytest.raises(NoSuchInputError):
        source.read(InputPosition(), 1, 1)
    source.close()


@pytest.mark.parametrize("format_", list(FileFormat))
def test_an_input_that_changed_is_not_read_on(
    place: tuple[str, str | None], format_: FileFormat, tmp_path: Path
) -> None:
    folder, endpoint = place
    url = f"{folder}/in.{format_}"
    spec = write_input(url, endpoint, format_, tmp_path)
    blob = blob_of(url, endpoint)
    source = source_of(blob, blob.fingerprint(), spec)
    _, position = source.read(InputPosition(), 5, 2**40)
    blob.write([b"something else"])

    with pytest.raises(InputChangedError, match="has changed since the job was submitted"):
        source.read(position, 5, 2**40)
    source.close()


def test_what_is_not_there_is_said(place: tuple[str, str | None]) -> None:
    folder, endpoint = place
    with pytest.raises(NoSuchInputError, match="there is no such"):
        blob_of(f"{folder}/none", endpoint).fingerprint()
    with pytest.raises(JobFailedError, match="only files and s3"):
        blob_of("ftp://host/x")
    with pytest.raises(JobFailedError, match="names no object"):
        blob_of("s3://bucket")


def test_a_large_row_is_never_held(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"id": 1}\n' + b"x" * 5_000_000 + b'\n{"id": 2}')
    spec = JobSpec(str(path), "out", max_row_bytes=1_000)
    source = source_of(blob_of(str(path)), blob_of(str(path)).fingerprint(), spec)
    first, large, last = [row for row, _ in read_all(source, 2)]

    assert (first, last) == (b'{"id": 1}', b'{"id": 2}')
    assert large == BadRow(None, "row", "5000000 bytes are more than 1000")


def test_columns_that_are_named_must_be_there(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_text("question,other\nwhy?,x\nonly one cell\n")
    spec = JobSpec(str(path), "out", FileFormat.CSV, columns={"question": "prompt"})
    blob = blob_of(str(path))
    good, bad = [row for row, _ in read_all(source_of(blob, blob.fingerprint(), spec), 9)]
    assert good == {"prompt": "why?"}
    assert bad == BadRow(None, "row", "1 cells; the header has 2")
    missing = source_of(blob, blob.fingerprint(), replace(spec, columns={"nothing": "prompt"}))
    with pytest.raises(NoSuchInputError, match="no column 'nothing'"):
        missing.read(InputPosition(), 1, 1)


def test_a_row_of_parquet_that_cannot_be_read_costs_no_other(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    prompts = pa.array([b"one", b"\xff\xfe", b"three"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"id": ["a", "b", "c"], "prompt": prompts}), path)
    blob = blob_of(str(path))
    source = source_of(blob, blob.fingerprint(), JobSpec(str(path), "out", FileFormat.PARQUET))

    for most_rows in (1, 3):
        rows = [row for row, _ in read_all(source, most_rows)]
        assert rows == [
            {"id": "a", "prompt": "one"},
            BadRow(None, "row", "cannot be read: UnicodeDecodeError"),
            {"id": "c", "prompt": "three"},
        ]
    source.close()


@pytest.mark.parametrize(
    ("places", "said"),
    [
        ({"output": "out.jsonl", "errors": "out.jsonl"}, "--errors is the same file as OUTPUT"),
        ({"output": "out.jsonl", "errors": "folder/../out.jsonl"}, "--errors is the same file as OUTPUT"),
        ({"output": "in.jsonl"}, "OUTPUT is the same file as INPUT"),
        ({"output": "linked.jsonl"}, "OUTPUT is the same file as INPUT"),
        ({"output": "out.jsonl", "errors": "in.jsonl"}, "--errors is the same file as INPUT"),
    ],
)
def test_no_file_is_written_over_another(
    places: dict[str, str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"model": "m", "prompt": "x"}\n')
    (tmp_path / "linked.jsonl").symlink_to(source)
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    spec = JobSpec.from_json({"input": str(source), **places})

    with pytest.raises(JobFailedError, match=said):
        survey("acme", spec)
    with pytest.raises(JobFailedError, match=said):
        FileParts(Job("ab" * 8, "acme", spec, Fingerprint(1, "1"), 1, 12))


def test_objects_are_the_same_by_bucket_and_key() -> None:
    assert are_same("s3://bucket/key", "s3://bucket//key")
    assert not are_same("s3://bucket/key", "s3://other/key")
    assert not are_same("s3://bucket/key", "bucket/key")


def test_a_path_means_the_same_to_whoever_runs_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert absolute("in.jsonl") == str(tmp_path / "in.jsonl")
    assert [absolute(url) for url in ("/in", "s3://bucket/in", "")] == ["/in", "s3://bucket/in", ""]


ANSWERS = [
    RowAnswer(
        0, "a", None, "id-0", Outcome.OK, model="m", output='{"text":"b \\" \\n"}', prompt_tokens=3, cost_tokens=3
    ),
    RowAnswer(1, 'quoted "x"', None, None, Outcome.REJECTED, "invalid", "prompt", "missing"),
    RowAnswer(2, None, None, "id-2", Outcome.EXPIRED, message="too late"),
]


@pytest.mark.parametrize("format_", list(FileFormat))
def test_parts_become_one_output(place: tuple[str, str | None], format_: FileFormat) -> None:
    folder, endpoint = place
    url = f"{folder}/out.{format_}"
    job = Job(
        "ab" * 8, "acme", JobSpec("in", url, output_format=format_, endpoint=endpoint), Fingerprint(1, "1"), 3, 12
    )
    parts = FileParts(job)
    names = [parts.write(0, ANSWERS[:2]), parts.write(1, ANSWERS[2:])]
    stale = FileParts(replace(job, token=9)).write(0, [])
    assert stale not in names
    parts.join(lambda: iter(names))
    parts.clean_up()

    blob = blob_of(url, endpoint)
    content = b"".join(blocks_of(blob, blob.fingerprint()))
    match format_:
        case FileFormat.JSONL:
            rows = [json.loads(line) for line in content.splitlines()]
            assert rows[0]["output"] == {"text": 'b " \n'}
            assert rows[1]["error"] == {"code": "invalid", "field": "prompt", "message": "missing"}
            ids = [row["id"] for row in rows]
        case FileFormat.CSV:
            ids = [row["row_id"] or None for row in csv.DictReader(content.decode().splitlines())]
        case FileFormat.PARQUET:
            ids = pq.read_table(pa.BufferReader(content)).column("row_id").to_pylist()
    assert ids == ["a", 'quoted "x"', None]
    with pytest.raises(NoSuchInputError):
        blob_of(f"{url}.parts-{job.job_id}/{names[0]}", endpoint).fingerprint()


@pytest.mark.parametrize(
    ("rows_of_part", "text_bytes", "parts", "groups"),
    [(1_000, 10, 150, [100_000, 50_000]), (20, 16 * 1024, 7, [60, 60, 20]), (70, 16 * 1024, 2, [70, 70])],
    ids=["small rows", "large rows", "parts that are too large for one"],
)
def test_parts_of_parquet_share_row_groups_of_a_bounded_size(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rows_of_part: int,
    text_bytes: int,
    parts: int,
    groups: list[int],
) -> None:
    if text_bytes > 10:
        monkeypatch.setattr(outputs, "_GROUP_BYTES", MEBIBYTE)
    url = str(tmp_path / "out.parquet")
    spec = JobSpec("in", url, output_format=FileFormat.PARQUET)
    files = FileParts(Job("ab" * 8, "acme", spec, Fingerprint(1, "1"), parts * rows_of_part, 12))
    first, other = (
        files.write(
            chunk,
            [
                RowAnswer(number, f"{chunk}-{number}", None, "id", Outcome.OK, output="x" * text_bytes)
                for number in range(rows_of_part)
            ],
        )
        for chunk in (0, 1)
    )
    names = [first, *[other] * (parts - 1)]
    files.join(lambda: iter(names))

    with pq.ParquetFile(url) as file:
        found = [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]
        ids = file.read(columns=["row_id"]).column("row_id").to_pylist()
    assert found == groups
    assert ids[: rows_of_part + 1] == [*(f"0-{number}" for number in range(rows_of_part)), "1-0"]
    assert ids[-1] == f"1-{rows_of_part - 1}"


def test_an_output_that_cannot_be_written_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    spec = JobSpec("in", str(tmp_path / "file" / "out.jsonl"))
    parts = FileParts(Job("ab" * 8, "acme", spec, Fingerprint(1, "1"), 1, 12))
    with pytest.raises(JobFailedError, match=r"Not a directory|File exists"):
        parts.write(0, ANSWERS)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_two_who_write_one_file_at_the_same_time_do_not_meet(tmp_path: Path) -> None:
    blob = blob_of(str(tmp_path / "out"))

    def blocks() -> Iterator[bytes]:
        yield b"first "
        blob.write([b"the other's"])
        assert (tmp_path / "out").read_bytes() == b"the other's"
        yield b"and last"

    blob.write(blocks())

    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("out", b"first and last")]


def test_a_survey_counts_rows_and_cost(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"model": "m", "prompt": "one two", "max_tokens": 4}\n' * 30)
    estimate, fingerprint = survey("acme", JobSpec(str(path), "out", chunk_rows=7))

    assert (estimate.rows, estimate.cost_tokens) == (30, 30 * (2 + 8))
    assert fingerprint.size_bytes == path.stat().st_size
    assert "10" in str(TooExpensiveError(estimate, 10))
    with pytest.raises(JobFailedError, match="tenant"):
        survey("../globex", JobSpec(str(path), "out"))
