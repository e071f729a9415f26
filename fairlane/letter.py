"""What stands on a dead-letter topic: letters, and the marks that say which of them were replayed. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fairlane import headers
from fairlane.codec import Codec, DecodeError
from fairlane.names import tenant_of_source
from fairlane.records import InferenceReply, InferenceRequest, SourceCoordinate, WorkItem

_NO_OFFSET = -1
_MOST_DIGITS = 18


def place_name(place: SourceCoordinate) -> str:
    """A place in the log as it is written everywhere: ``dead-letter.work-0@12``."""
    return f"{place.topic}-{place.partition}@{place.offset}"


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """A record of a dead-letter topic as it stands in the log; ``timestamp_ms`` is the record's own."""

    place: SourceCoordinate
    timestamp_ms: int
    key: bytes | None
    value: bytes
    headers: Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class ReplayMark:
    """That the letter at ``letter`` was replayed as the request ``request_id``. It stands in the letter's own partition
    and so always behind it: whatever removes the mark has removed the letter before."""

    letter: SourceCoordinate
    request_id: str


@dataclass(frozen=True, slots=True)
class Letter:
    """A dead letter, as far as it can be read.

    ``content`` is the record that its bytes hold, None where they hold none, and ``problem`` then says why.
    """

    record: StoredRecord
    content: object | None
    problem: str | None = None

    @property
    def place(self) -> SourceCoordinate:
        return self.record.place

    @property
    def died_at_ms(self) -> int:
        """When it was written here."""
        return self.record.timestamp_ms

    @property
    def kind(self) -> str | None:
        """The name of the record it holds."""
        return None if self.content is None else type(self.content).__name__

    @property
    def request(self) -> InferenceRequest | None:
        """The request in it, if there is one."""
        if isinstance(self.content, WorkItem):
            return self.content.request
        return self.content if isinstance(self.content, InferenceRequest) else None

    @property
    def request_id(self) -> str | None:
        """Of what it holds; of bytes that hold nothing, the key they came with, which should be the id."""
        if self.request is not None:
            return self.request.request_id
        if isinstance(self.content, InferenceReply):
            return self.content.request_id
        return None if self.record.key is None else self.record.key.decode(errors="replace")

    @property
    def tenant(self) -> str | None:
        """Whose it is, by the topic it stood on first; never by what a tenant wrote itself."""
        if isinstance(self.content, WorkItem | InferenceReply):
            return self.content.tenant
        if (said := self.header(headers.TENANT)) is not None:
            return said
        try:
            return tenant_of_source(self.header(headers.DLT_ORIGINAL_TOPIC) or "")
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
        """The class of the exception it died of, with its module."""
        return self.header(headers.DLT_EXCEPTION_CLASS)

    @property
    def message(self) -> str | None:
        return self.header(headers.DLT_EXCEPTION_MESSAGE)

    @property
    def original(self) -> SourceCoordinate | None:
        """Where the record stood that was read; None when the headers do not say."""
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
    """The letter or the mark that a record is. Raises RegistryError when a registry has the schemas and is away."""
    marked = record.headers.get(headers.REPLAYED_OFFSET)
    if marked is not None:
        place, offset = record.place, _number(marked.decode(errors="replace"))
        if offset is None or offset >= place.offset:
            offset = _NO_OFFSET  # nobody's: a mark stands behind its letter
        new_id = record.headers.get(headers.REPLAYED_AS, b"").decode(errors="replace")
        return ReplayMark(SourceCoordinate(place.topic, place.partition, offset), new_id)
    try:
        return Letter(record, codec.decode(record.value))
    except DecodeError as error:
        return Letter(record, None, str(error))


def mark_headers(letter: SourceCoordinate, request_id: str) -> tuple[tuple[str, bytes], ...]:
    """The headers of a record that says, beside no value at all, that a letter of its partition was replayed."""
    return (headers.REPLAYED_OFFSET, b"%d" % letter.offset), (headers.REPLAYED_AS, request_id.encode())


def headers_of(given: Mapping[str, object] | Iterable[tuple[str, object]] | None) -> dict[str, bytes]:
    """A message's headers by name; of a name that comes twice, the last."""
    return {name: value for name, value in dict(given or ()).items() if isinstance(value, bytes)}


def _number(text: str | None) -> int | None:
    if text is None or len(text) > _MOST_DIGITS or not (text.isascii() and text.isdecimal()):
        return None
    return int(text)
