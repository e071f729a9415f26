"""Which partition of a shared reply topic a reply comes to, told by the id of its request before anything is published.

Replies carry the id of their request as key, and their producers place keys by librdkafka's default: CRC-32 of the key
modulo the number of partitions. So whoever makes the id chooses the partition.
"""

from collections.abc import Collection
from uuid import uuid4
from zlib import crc32


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
        request_id = str(uuid4())
        if partition_of(request_id, partitions) in wanted:
            return request_id
