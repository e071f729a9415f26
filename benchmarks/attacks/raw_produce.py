"""A produce request by hand: any bytes as a batch, as a tenant's client of its own making could send them."""

import socket
import struct
from time import monotonic, sleep

from confluent_kafka import KafkaError

_PRODUCE, _VERSION = 0, 7
_ALL_REPLICAS = -1
_TIMEOUT_MS = 30_000
_LEADER_MISSING = (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.NOT_LEADER_FOR_PARTITION)
_LEADER_TIMEOUT_S = 10
_LEADER_RETRY_S = 0.05
_RESPONSE = struct.Struct(">ihqqq")


class ProduceRefusedError(Exception):
    """The broker refused a batch, with this error code and its name."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.name = KafkaError(code).name()
        super().__init__(self.name)


def produce(bootstrap_servers: str, topic: str, batch: bytes, *, partition: int = 0) -> int:
    """Write one batch. Returns its base offset. Raises ProduceRefusedError."""
    deadline = monotonic() + _LEADER_TIMEOUT_S
    while True:
        try:
            return _produce_once(bootstrap_servers, topic, batch, partition)
        except ProduceRefusedError as refused:
            # As every client does: a broker leads a new partition only a moment after it was created.
            if refused.code not in _LEADER_MISSING or monotonic() > deadline:
                raise
            sleep(_LEADER_RETRY_S)


def _produce_once(bootstrap_servers: str, topic: str, batch: bytes, partition: int) -> int:
    host, port = bootstrap_servers.split(",", maxsplit=1)[0].rsplit(":", 1)
    request = struct.pack(">hhi", _PRODUCE, _VERSION, 1) + _string("hostile") + struct.pack(">h", -1)
    request += struct.pack(">hi", _ALL_REPLICAS, _TIMEOUT_MS)
    request += struct.pack(">i", 1) + _string(topic) + struct.pack(">ii", 1, partition)
    request += struct.pack(">i", len(batch)) + batch
    with socket.create_connection((host, int(port)), timeout=_TIMEOUT_MS / 1_000) as connection:
        connection.sendall(struct.pack(">i", len(request)) + request)
        (size,) = struct.unpack(">i", _exactly(connection, 4))
        response = _exactly(connection, size)
    # The correlation id, one topic with its name, one partition.
    found = 4 + 4 + 2 + len(topic) + 4
    _, code, base_offset, _, _ = _RESPONSE.unpack_from(response, found)
    if code:
        raise ProduceRefusedError(code)
    return int(base_offset)


def _string(text: str) -> bytes:
    return struct.pack(">h", len(text)) + text.encode()


def _exactly(connection: socket.socket, size: int) -> bytes:
    parts: list[bytes] = []
    while size:
        part = connection.recv(size)
        if not part:
            raise ConnectionError("the broker closed the connection")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
