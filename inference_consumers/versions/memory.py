"""Memory of versions: what one will need, by what another was measured to hold, and whether that fits. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

_MOST_BYTES_PER_FILE_BYTE = 8
"""Numbers of 4 bits in the files may become numbers of 32 in memory."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of the machine's memory and of a GPU's. ``fills_device``: a fixed part of the GPU, whatever the model."""

    main_bytes: int = 0
    device_bytes: int = 0
    fills_device: bool = False


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """Bytes that are left. ``device_bytes`` is None where no engine uses a GPU."""

    main_bytes: int
    device_bytes: int | None = None


def predicted(held: Memory, held_files_bytes: int, files_bytes: int | None) -> Memory:
    """What a version will hold, given what another one of its model was measured to hold, and the sizes of their files.

    In proportion to the files, but with no more than 8 bytes for each byte that they have more: the rest is the process
    itself and its libraries. Never less than what was measured. ``files_bytes`` None: not known, taken to be the same.
    """
    more_bytes = 0 if files_bytes is None else max(0, files_bytes - held_files_bytes)

    def grown(size_bytes: int) -> int:
        in_proportion = size_bytes * more_bytes // held_files_bytes if held_files_bytes else size_bytes
        return size_bytes + min(in_proportion, _MOST_BYTES_PER_FILE_BYTE * more_bytes)

    return Memory(grown(held.main_bytes), grown(held.device_bytes), held.fills_device)


def larger(one: Memory, other: Memory) -> Memory:
    """At least as much as both."""
    return Memory(
        max(one.main_bytes, other.main_bytes),
        max(one.device_bytes, other.device_bytes),
        one.fills_device or other.fills_device,
    )


def fits(
    need: Memory, free: FreeMemory, reserve_bytes: int, *, beside: Iterable[Memory] = (), without: Iterable[Memory] = ()
) -> bool:
    """Whether a version fits ``beside`` those that stay loaded, when those ``without`` which it is loaded are gone, and
    leaves the reserve free."""
    gone = tuple(without)
    if need.main_bytes + reserve_bytes > free.main_bytes + sum(one.main_bytes for one in gone):
        return False
    if need.fills_device and any(one.fills_device for one in beside):
        return False
    if free.device_bytes is None or not need.device_bytes or need.fills_device:
        return True
    return need.device_bytes + reserve_bytes <= free.device_bytes + sum(one.device_bytes for one in gone)
