"""Writes answers into parts and joins the parts: JSONL, CSV or Parquet. A part is complete or absent."""

import csv
import io
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import combinations
from typing import Any

from fairlane.outcomes import Outcome
from fairlane.records import InferenceReply
from producers.backfill.answers import RowAnswer
from producers.backfill.errors import JobFailedError, NoSuchInputError
from producers.backfill.files import Blob, are_same, blob_of, blocks_of, delete_folder
from producers.backfill.job import MEBIBYTE, FileFormat, Job, JobSpec
from producers.openai_api.errors import error_body, error_of

_COLUMNS = tuple(field.name for field in fields(RowAnswer) if field.name != "url")
_HEADER = (",".join(_COLUMNS) + "\r\n").encode()
_GROUP_ROWS = 100_000
_GROUP_BYTES = 64 * MEBIBYTE
"""Largest row group of the output; about the memory that joining the parts takes."""
_ERRORS: Mapping[str, str] = {Outcome.EXPIRED: "batch_expired", Outcome.CANCELLED: "batch_cancelled"}
"""OpenAI's codes of requests that were not run."""


class FileParts:
    """Storage of results until the output is complete: files in a folder beside it. All raise UnavailableError and
    JobFailedError.

    The name of a part contains the runner's token: a runner that lost its lease overwrites no valid part.
    """

    def __init__(self, job: Job) -> None:
        """Raises JobFailedError for an unusable output."""
        check_places(job.spec)
        self._spec = job.spec
        self._token = job.token
        self._job_id = job.job_id
        self._outputs = [url for url in (job.spec.output, job.spec.errors) if url is not None]
        for url in self._outputs:
            blob_of(url, job.spec.endpoint)

    def write(self, chunk: int, answers: Sequence[RowAnswer]) -> str:
        """Store the results of a chunk atomically; durable when this returns. Returns the name of the part."""
        name = f"{chunk:010d}-{self._token}"
        for url, some in zip(self._outputs, self._split(answers), strict=True):
            self._part(url, name).write([rendered(some, self._spec)])
        return name

    def join(self, parts: Callable[[], Iterator[str]]) -> None:
        """Write the output from these parts, atomically; ``parts`` may be called more than once."""
        for url in self._outputs:
            blob_of(url, self._spec.endpoint).write(self._joined(self._part(url, name) for name in parts()))

    def clean_up(self) -> None:
        """Remove every part, once the output is complete."""
        for url in self._outputs:
            delete_folder(parts_folder(url, self._job_id), self._spec.endpoint)

    def _joined(self, parts: Iterable[Blob]) -> Iterator[bytes]:
        if self._spec.output_format is FileFormat.PARQUET:
            yield from _joined_parquet(parts)
            return
        if self._spec.output_format is FileFormat.CSV:
            yield _HEADER
        for part in parts:
            yield from blocks_of(part, part.fingerprint())

    def _split(self, answers: Sequence[RowAnswer]) -> list[list[RowAnswer]]:
        if len(self._outputs) == 1:
            return [list(answers)]
        ok = [answer for answer in answers if answer.outcome == Outcome.OK]
        return [ok, [answer for answer in answers if answer.outcome != Outcome.OK]]

    def _part(self, url: str, name: str) -> Blob:
        return blob_of(f"{parts_folder(url, self._job_id)}/{name}", self._spec.endpoint)


def parts_folder(url: str, job_id: str) -> str:
    """Folder of an output's parts until they are joined."""
    return f"{url}.parts-{job_id}"


def check_places(spec: JobSpec) -> None:
    """Raises JobFailedError when one file would be written over another."""
    places = {"INPUT": spec.input, "OUTPUT": spec.output or None, "--errors": spec.errors}
    named = [(name, url) for name, url in places.items() if url is not None]
    for (name, url), (other, other_url) in combinations(named, 2):
        if are_same(url, other_url):
            raise JobFailedError(f"{other} is the same file as {name}: {other_url}")


def rendered(answers: Sequence[RowAnswer], spec: JobSpec) -> bytes:
    """Results rendered in the output's format; CSV without its header."""
    match spec.output_format:
        case FileFormat.JSONL:
            return b"".join(_line(answer) for answer in answers)
        case FileFormat.CSV:
            text = io.StringIO()
            csv.writer(text).writerows(_cells(answer) for answer in answers)
            return text.getvalue().encode()
        case FileFormat.PARQUET:
            return _parquet(answers)


def _line(answer: RowAnswer) -> bytes:
    text = _plain_line(answer) if answer.url is None else _openai_line(answer, answer.request_id or f"row-{answer.row}")
    return text.encode("utf-8", "replace") + b"\n"


def _plain_line(answer: RowAnswer) -> str:
    ok = answer.output is not None
    said: dict[str, Any] = (
        {"model": answer.model, "finish_reason": answer.finish_reason}
        if ok
        else {"error": {"code": answer.code, "field": answer.field, "message": answer.message}}
    )
    usage = {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "cost_tokens": answer.cost_tokens,
    }
    head = _json({"row": answer.row, "id": answer.row_id, "outcome": answer.outcome})[:-1]
    # ``output`` is JSON already: it is not parsed and rendered again for every row.
    output = f',"output":{answer.output}' if ok else ""
    return f"{head}{output},{_json({**said, 'usage': usage, 'request_id': answer.request_id})[1:]}"


def _openai_line(answer: RowAnswer, name: str) -> str:
    line: dict[str, Any] = {"id": f"batch_req_{name}", "custom_id": answer.row_id, "response": None, "error": None}
    if answer.output is not None:
        del line["response"]
        head, response = _json(line)[:-1], _json({"status_code": 200, "request_id": name})[:-1]
        return f'{head},"response":{response},"body":{answer.output}}}}}'
    if answer.outcome in _ERRORS:
        line["error"] = {"code": _ERRORS[answer.outcome], "message": answer.message}
        return _json(line)
    error = error_of(InferenceReply(name, "", answer.outcome, answer.code, answer.field, answer.message))
    if error is not None:
        line["response"] = {"status_code": error.status, "request_id": name, "body": error_body(error)}
    return _json(line)


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _cells(answer: RowAnswer) -> tuple[Any, ...]:
    return tuple(getattr(answer, name) for name in _COLUMNS)


def _schema() -> Any:
    import pyarrow as pa

    numbers = {"row", "prompt_tokens", "completion_tokens", "cost_tokens"}
    return pa.schema([(name, pa.int64() if name in numbers else pa.string()) for name in _COLUMNS])


def _parquet(answers: Sequence[RowAnswer]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [dict(zip(_COLUMNS, _cells(answer), strict=True)) for answer in answers]
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows, schema=_schema()), sink)
    return bytes(sink.getvalue())


def _joined_parquet(parts: Iterable[Blob]) -> Iterator[bytes]:
    """One file with row groups of many parts; the writer keeps the metadata of each group until the end."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    written = _Drained()
    with pq.ParquetWriter(pa.PythonFile(written, mode="w"), _schema()) as writer:
        for group in _row_groups(_table_of(part) for part in parts):
            writer.write_table(group, row_group_size=max(1, group.num_rows))
            # Otherwise it would stay in memory until the next one is complete.
            del group
            yield from written.take()
    yield from written.take()


def _table_of(part: Blob) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with part.open() as file:
        try:
            return pq.read_table(pa.BufferReader(file.read()))
        except pa.ArrowException:
            raise NoSuchInputError("a part of the output cannot be read") from None


def _row_groups(tables: Iterable[Any]) -> Iterator[Any]:
    """Tables joined in order up to the size of a row group. A larger table is a group by itself."""
    import pyarrow as pa

    held: list[Any] = []
    rows = size_bytes = 0
    for table in tables:
        if held and (rows + table.num_rows > _GROUP_ROWS or size_bytes + table.nbytes > _GROUP_BYTES):
            yield pa.concat_tables(held)
            held, rows, size_bytes = [], 0, 0
        held.append(table)
        rows += table.num_rows
        size_bytes += table.nbytes
    if held:
        yield pa.concat_tables(held)


class _Drained(io.RawIOBase):
    """Buffer that is emptied as it is written, so that a file may be larger than memory."""

    def __init__(self) -> None:
        super().__init__()
        self._blocks: deque[bytes] = deque()
        self._position = 0

    def writable(self) -> bool:
        return True

    def write(self, block: Any) -> int:
        self._blocks.append(bytes(block))
        self._position += len(block)
        return len(block)

    def tell(self) -> int:
        return self._position

    def take(self) -> Iterator[bytes]:
        """Remove and return the written blocks."""
        while self._blocks:
            yield self._blocks.popleft()
