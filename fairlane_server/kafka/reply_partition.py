"""Partition of a shared reply topic, computed from the request id before anything is published.

Replies have the request id as key, and their producers use librdkafka's default partitioner: CRC-32 of the key modulo
the number of partitions. Choosing the id therefore chooses the partition.
"""

from collections.abc import Collection
from uuid import uuid4
from zlib import crc32


def partition_of(request_id: str, partitions: int) -> int:
    return crc32(request_id.encode()) % partitions


def new_request_id(wanted: Collection[int], partitions: int) -> str:
    """A random id whose reply goes to one of the ``wanted`` partitions of a topic with ``partitions`` partitions.

    Takes ``partitions / len(wanted)`` tries on average. Raises ValueError when no wanted partition exists.
    """
    if not any(0 <= partition < partitions for partition in wanted):
        raise ValueError(f"none of the {partitions} partitions is wanted")
    while True:
        request_id = str(uuid4())
        if partition_of(request_id, partitions) in wanted:
            return request_id
