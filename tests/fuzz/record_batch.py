"""Record batches to be mutated, and the repair that lets a mutation get past length and checksum."""

import struct
from collections.abc import Sequence
from random import Random

from benchmarks.record_batches import Written, batch
from tests.kit.broker_log import CHECKED_FROM, with_crc

_GZIP = 1
_LENGTH_AT, _LENGTH_END = 8, 12


def repaired(data: bytes) -> bytes:
    """The batch with the length and the checksum that its bytes have: what is wrong in it is not found by those."""
    if len(data) <= CHECKED_FROM:
        return data
    return with_crc(data[:_LENGTH_AT] + struct.pack(">i", len(data) - _LENGTH_END) + data[_LENGTH_END:])


def some_batch(rng: Random, values: Sequence[bytes], timestamp_ms: int) -> bytes:
    """A batch of one to five of these values."""
    chosen = [
        Written(rng.choice(values), rng.randbytes(8), ((b"traceparent", b"x"),)) for _ in range(rng.randint(1, 5))
    ]
    return batch(chosen, timestamp_ms=timestamp_ms, codec=_GZIP if rng.random() < 0.3 else 0)
