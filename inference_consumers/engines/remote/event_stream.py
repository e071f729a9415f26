"""Server-sent events (WHATWG HTML, section 9.2.6), as far as OpenAI's interface uses them: the data of each event."""

from collections.abc import Iterator


class EventStreamError(Exception):
    """The stream is longer than allowed."""


class EventStream:
    """Splits bytes as they come into the data of events. Nothing is kept but the beginning of the next event."""

    def __init__(self, most_bytes: int) -> None:
        """``most_bytes`` bounds one event."""
        self._most_bytes = most_bytes
        self._rest = bytearray()
        self._data: list[bytes] = []
        self._data_bytes = 0

    def feed(self, part: bytes) -> Iterator[bytes]:
        """The data of the events that end in this part. Raises EventStreamError."""
        self._rest += part
        # Only then, so that a long line in tiny parts is not split again with each of them.
        if b"\n" in part:
            # CR LF and LF end a line; a lone CR, which the standard knows too, is written by no server of this kind.
            *lines, self._rest = self._rest.split(b"\n")
            for line in lines:
                yield from self._take(bytes(line.removesuffix(b"\r")))
        if len(self._rest) + self._data_bytes > self._most_bytes:
            raise EventStreamError(f"an event is longer than {self._most_bytes} bytes")

    def _take(self, line: bytes) -> Iterator[bytes]:
        if not line:
            if self._data:
                yield b"\n".join(self._data)
            self._data, self._data_bytes = [], 0
            return
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
            self._data_bytes += len(value)
