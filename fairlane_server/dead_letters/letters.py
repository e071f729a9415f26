"""Dead letters as tools read them, and the marks of replayed letters. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from fairlane import headers
from fairlane.codec import Codec, DecodeError
from fairlane.names import tenant_of_request_topic
from fairlane.records import InferenceReply, InferenceRequest, SourceCoordinate, WorkItem
from fairlane_server.models.routes import NAMED_VERSION, version_key

_NO_OFFSET = -1
_MOST_DIGITS = 18


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """A record of a dead-letter topic as stored in the log; ``timestamp_ms`` is the record's own."""

    place: SourceCoordinate
    timestamp_ms: int
    key: bytes | None
    value: bytes
    headers: Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class ReplayMark:
    """The letter at ``letter`` was replayed as request ``request_id``. The mark is in the letter's own partition,
    always behind it: whatever removed the mark has removed the letter before."""

    letter: SourceCoordinate
    request_id: str


@dataclass(frozen=True, slots=True)
class Letter:
    """A dead letter, decoded as far as possible.

    ``content`` is the decoded record; None when the bytes cannot be decoded, and ``problem`` then says why.
    """

    record: StoredRecord
    content: object | None
    problem: str | None = None

    @property
    def place(self) -> SourceCoordinate:
        return self.record.place

    @property
    def died_at_ms(self) -> int:
        """When the letter was written."""
        return self.record.timestamp_ms

    @property
    def kind(self) -> str | None:
        """Name of the decoded record's type."""
        return None if self.content is None else type(self.content).__name__

    @property
    def request(self) -> InferenceRequest | None:
        """The request in it, if any; of work for a version that it named, with the version."""
        if isinstance(self.content, WorkItem):
            request = self.content.request
            if self.content.arm != NAMED_VERSION:
                return request
            return replace(request, model=version_key(request.model, self.content.model_version))
        return self.content if isinstance(self.content, InferenceRequest) else None

    @property
    def request_id(self) -> str | None:
        """Id of the request or reply; for undecodable bytes their key, which should be the id."""
        if self.request is not None:
            return self.request.request_id
        if isinstance(self.content, InferenceReply):
            return self.content.request_id
        return None if self.record.key is None else self.record.key.decode(errors="replace")

    @property
    def tenant(self) -> str | None:
        """Tenant as determined by services: from a work item or reply, the tenant header, or the original topic. Fields
        that a tenant wrote do not count."""
        if isinstance(self.content, WorkItem | InferenceReply):
            return self.content.tenant
        if (said := self.header(headers.TENANT)) is not None:
            return said
        try:
            return tenant_of_request_topic(self.header(headers.DLT_ORIGINAL_TOPIC) or "")
        except ValueError:
            return None

    @property
    def model(self) -> str | None:
        if self.request is not None:
            return self.request.model
        if isinstance(self.content, InferenceReply):
            return self.content.model
        return self.header(headers.MODEL)

    @property
    def exception(self) -> str | None:
        """Class of the exception that made it a dead letter, with its module."""
        return self.header(headers.DLT_EXCEPTION_CLASS)

    @property
    def message(self) -> str | None:
        return self.header(headers.DLT_EXCEPTION_MESSAGE)

    @property
    def original(self) -> SourceCoordinate | None:
        """Position of the record that was read; None when the headers do not name it."""
        topic = self.header(headers.DLT_ORIGINAL_TOPIC)
        partition = _number(self.header(headers.DLT_ORIGINAL_PARTITION))
        offset = _number(self.header(headers.DLT_ORIGINAL_OFFSET))
        if topic is None or partition is None or offset is None:
            return None
        return SourceCoordinate(topic, partition, offset)

    @property
    def original_at_ms(self) -> int | None:
        return _number(self.header(headers.DLT_ORIGINAL_TIMESTAMP))

    def header(self, name: str) -> str | None:
        """A header's text; None when it is missing."""
        value = self.record.headers.get(name)
        return None if value is None else value.decode(errors="replace")


def read_record(record: StoredRecord, codec: Codec) -> Letter | ReplayMark:
    """Decode a record to a letter or a mark. Raises RegistryError when a schema registry is in use and unavailable."""
    marked = record.headers.get(headers.REPLAYED_OFFSET)
    if marked is not None:
        place, offset = record.place, _number(marked.decode(errors="replace"))
        if offset is None or offset >= place.offset:
            offset = _NO_OFFSET  # marks no letter: a mark is always behind its letter
        new_id = record.headers.get(headers.REPLAYED_AS, b"").decode(errors="replace")
        return ReplayMark(SourceCoordinate(place.topic, place.partition, offset), new_id)
    try:
        return Letter(record, codec.decode(record.value))
    except DecodeError as error:
        return Letter(record, None, str(error))


def mark_headers(letter: SourceCoordinate, request_id: str) -> tuple[tuple[str, bytes], ...]:
    """Headers of a record without value that marks a letter of its partition as replayed."""
    return (headers.REPLAYED_OFFSET, b"%d" % letter.offset), (headers.REPLAYED_AS, request_id.encode())


def headers_of(given: Mapping[str, object] | Iterable[tuple[str, object]] | None) -> dict[str, bytes]:
    """A message's headers by name; of a repeated name the last counts."""
    return {name: value for name, value in dict(given or ()).items() if isinstance(value, bytes)}


def _number(text: str | None) -> int | None:
    if text is None or len(text) > _MOST_DIGITS or not (text.isascii() and text.isdecimal()):
        return None
    return int(text)
