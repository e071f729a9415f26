"""Messages between a consumer and an engine's process, and their transport.

Typed MessagePack instead of pickles: what comes out of a process that runs a stranger's model is data, never code.
"""

import threading
from multiprocessing.connection import Connection

import msgspec

from fairlane.records import ModelVersion
from inference_consumers.engines.protocol import Cancelled, EngineItem, Failure, ItemOutcome, Problem, Success


class EngineSpec(msgspec.Struct, frozen=True):
    """Everything an engine is made from: its process reads no settings."""

    model: ModelVersion
    models_dir: str
    engine: str
    """Its name in the registry, which may differ from the one in models.yaml: simulated."""
    threads: int = 0
    device: str = "auto"
    simulated_prefill_tokens_per_s: float = 0.0
    """0 means that it takes no time."""
    simulated_decode_tokens_per_s: float = 0.0
    simulated_batch_ms: float = 0.0
    simulated_memory_tokens: int = 0
    allow_unsafe_weights: bool = False
    """Whether files may be loaded that can run any code."""


class Load(msgspec.Struct, frozen=True, tag=True):
    """Make this engine and load it; the first message."""

    spec: EngineSpec


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


class LoadFailed(msgspec.Struct, frozen=True, tag=True):
    """The model cannot be served, and trying again would not help; the process ends."""

    message: str


class Finished(msgspec.Struct, frozen=True):
    """The outcome of one item: one of the three."""

    index: int
    success: Success | None = None
    failure: Failure | None = None
    cancelled: Cancelled | None = None

    def __post_init__(self) -> None:
        if [self.success, self.failure, self.cancelled].count(None) != 2:
            raise ValueError("an item has one outcome")

    @classmethod
    def of(cls, index: int, outcome: ItemOutcome) -> "Finished":
        match outcome:
            case Success():
                return cls(index, success=outcome)
            case Failure():
                return cls(index, failure=outcome)
            case Cancelled():
                return cls(index, cancelled=outcome)

    @property
    def outcome(self) -> ItemOutcome:
        found = self.success or self.failure or self.cancelled
        assert found is not None  # noqa: S101 - see __post_init__
        return found


class Text(msgspec.Struct, frozen=True):
    """More of one item's text."""

    index: int
    delta: str


class Step(msgspec.Struct, frozen=True, tag=True):
    """A run came further."""

    run_id: int
    texts: tuple[Text, ...] = ()
    finished: tuple[Finished, ...] = ()


class Ended(msgspec.Struct, frozen=True, tag=True):
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


ToEngine = Load | Run | Cancel | Close
FromEngine = Loaded | LoadFailed | Step | Ended | Died | Metrics


class Channel:
    """One end of the line between a consumer and an engine's process. ``read`` by one thread, ``write`` by any."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._encoder = msgspec.msgpack.Encoder()
        self._lock = threading.Lock()

    def has_message(self, timeout_s: float) -> bool:
        """Wait for something to read. True as well when the other side is gone."""
        return self._connection.poll(timeout_s)

    def read(self) -> bytes:
        """Raises EOFError or OSError when the other side is gone."""
        return self._connection.recv_bytes()

    def write(self, message: ToEngine | FromEngine) -> None:
        """Blocks while the other side does not read. Raises OSError when it is gone, and UnicodeEncodeError for text
        that is none."""
        data = self._encoder.encode(message)
        with self._lock:
            self._connection.send_bytes(data)

    def close(self) -> None:
        """The other side must be gone: a writer that is blocked there would be waited for."""
        with self._lock:
            self._connection.close()


to_engine: "msgspec.msgpack.Decoder[ToEngine]" = msgspec.msgpack.Decoder(ToEngine)
"""Raises msgspec.DecodeError for bytes that are no message to an engine."""

from_engine: "msgspec.msgpack.Decoder[FromEngine]" = msgspec.msgpack.Decoder(FromEngine)
"""Raises msgspec.DecodeError for bytes that are no message from an engine."""


def can_be_written(outcome: "Finished") -> bool:
    """Whether the outcome can be encoded: lone surrogates cannot."""
    try:
        msgspec.msgpack.encode(outcome)
    except (UnicodeEncodeError, OverflowError, TypeError):
        return False
    return True
