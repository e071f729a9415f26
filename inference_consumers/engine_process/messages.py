"""Messages between a consumer and an engine's process, and their transport.

Typed MessagePack instead of pickles: what comes out of a process that runs a stranger's model is data, never code.
"""

import threading
from multiprocessing.connection import Connection

import msgspec

from inference_consumers.engines.protocol import (
    EngineItem,
    EngineMemory,
    EngineSpec,
    ItemOutcome,
    LoadFailed,
    Problem,
)


class Run(msgspec.Struct, frozen=True, tag=True):
    """Run these items. Another may follow before this one ended only when the engine is continuous."""

    run_id: int
    items: tuple[EngineItem, ...]


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Stop these items of a run, named by their places in it."""

    run_id: int
    indexes: tuple[int, ...]


class Close(msgspec.Struct, frozen=True, tag=True):
    """Finish what runs, and end. Nothing is run that comes after this."""


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The engine is loaded and warm."""

    name: str
    continuous: bool
    seconds: float
    memory: EngineMemory = EngineMemory()


class Finished(msgspec.Struct, frozen=True):
    """The outcome of one item."""

    index: int
    outcome: ItemOutcome


class Text(msgspec.Struct, frozen=True):
    """More of one item's text."""

    index: int
    delta: str


class RunStep(msgspec.Struct, frozen=True, tag=True):
    """A run came further."""

    run_id: int
    texts: tuple[Text, ...] = ()
    finished: tuple[Finished, ...] = ()


class RunEnded(msgspec.Struct, frozen=True, tag=True):
    """A run is over. ``seconds`` is engine time."""

    run_id: int
    seconds: float
    useful_tokens: int = 0
    computed_tokens: int = 0
    problem: Problem | None = None


class Died(msgspec.Struct, frozen=True, tag=True):
    """The engine can run nothing any more; its process ends."""

    error: str


class Metrics(msgspec.Struct, frozen=True, tag=True):
    """The engine's own metrics, in the text format of Prometheus."""

    text: str


# The first message is what the engine is made from.
_ToEngine = EngineSpec | Run | Cancel | Close
FromEngine = Loaded | LoadFailed | RunStep | RunEnded | Died | Metrics


class Channel:
    """One end of the line between a consumer and a process of an engine or a check. ``read`` by one thread, ``write``
    by any."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._encoder = msgspec.msgpack.Encoder()
        self._lock = threading.Lock()

    def has_message(self, timeout_s: float) -> bool:
        """Wait for something to read. True as well when the other side is gone."""
        return self._connection.poll(timeout_s)

    def fileno(self) -> int:
        """For ``multiprocessing.connection.wait``."""
        return self._connection.fileno()

    def read(self) -> bytes:
        """Raises EOFError or OSError when the other side is gone."""
        return self._connection.recv_bytes()

    def write(self, message: msgspec.Struct) -> None:
        """Blocks while the other side does not read. Raises OSError when it is gone, and UnicodeEncodeError for
        invalid text."""
        data = self._encoder.encode(message)
        with self._lock:
            self._connection.send_bytes(data)

    def close(self) -> None:
        """The other side must be gone: a writer that is blocked there would be waited for."""
        with self._lock:
            self._connection.close()


to_engine: "msgspec.msgpack.Decoder[_ToEngine]" = msgspec.msgpack.Decoder(_ToEngine)
"""Raises msgspec.DecodeError for bytes that are no message to an engine."""

from_engine: "msgspec.msgpack.Decoder[FromEngine]" = msgspec.msgpack.Decoder(FromEngine)
"""Raises msgspec.DecodeError for bytes that are no message from an engine."""
