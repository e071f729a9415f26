"""Which partition of a shared reply topic a reply comes to, told by the id of its request before anything is published.

Replies carry the id of their request as key, and their producers place keys by librdkafka's default: CRC-32 of the key
modulo the number of partitions. So whoever makes the id chooses the partition.
"""

import os
from collections import deque
from collections.abc import Collection
from uuid import UUID
from zlib import crc32

_ID_BYTES = 16
_IDS_AT_A_TIME = 256
_drawn: deque[bytes] = deque()
"""Random bytes for ids to come: asking the system for each alone hands the interpreter to other threads each time."""
os.register_at_fork(after_in_child=_drawn.clear)


def partition_of(request_id: str, partitions: int) -> int:
    """The partition, of so many, that the reply to this request stands in."""
    return crc32(request_id.encode()) % partitions


def new_request_id(wanted: Collection[int], partitions: int) -> str:
    """A random id whose reply comes to one of the ``wanted`` partitions of a topic that has ``partitions``.

    Takes ``partitions / len(wanted)`` tries on average. Raises ValueError when no id could come there.
    """
    if not any(0 <= partition < partitions for partition in wanted):
        raise ValueError(f"none of the {partitions} partitions is wanted")
    while True:
        request_id = str(UUID(bytes=_random_bytes(), version=4))
        if partition_of(request_id, partitions) in wanted:
            return request_id


def _random_bytes() -> bytes:
    while True:
        try:
            return _drawn.popleft()
        except IndexError:
            fresh = os.urandom(_ID_BYTES * _IDS_AT_A_TIME)
            _drawn.extend(fresh[start : start + _ID_BYTES] for start in range(0, len(fresh), _ID_BYTES))
