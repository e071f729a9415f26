"""Decompression of Kafka's codecs into a bounded number of bytes.

A batch of 4 MiB on the wire can decompress to gigabytes. librdkafka and aiokafka decompress without a limit; here the
output is bounded, and memory grows with the bytes written, never with the size that a frame announces.
"""

import zlib
from collections.abc import Callable
from typing import Final

import cramjam

CODECS: Final = ("none", "gzip", "snappy", "lz4", "zstd")
"""Indexed by the codec number in the attributes of a batch (KIP-98, KIP-110)."""

_GZIP_WINDOW_BITS = 31
# The framing of snappy-java, which Java's producer writes: magic, version, compatible version, then length and block.
_XERIAL_MAGIC = b"\x82SNAPPY\x00"
_XERIAL_HEADER_BYTES = 16
_FIRST_GUESS_BYTES = _PIECE_BYTES = 65_536
# gzip members (clients write one) or snappy blocks (clients write 1 KiB and more).
_MAX_FRAMES = 16_384
_GUESS_FACTOR = 4
# Error text of cramjam for a full output buffer; any other error means a broken input.
_BUFFER_FULL = "failed to write whole buffer"

_Into = Callable[[bytes, bytearray], int]


class InflationError(ValueError):
    """Decompression failed. ``too_large``: because the limit was reached."""

    def __init__(self, message: str, *, too_large: bool = False) -> None:
        super().__init__(message)
        self.too_large = too_large


def inflate(codec: int, data: bytes, max_bytes: int) -> bytes:
    """Decompress ``data``. Raises InflationError for a broken input and beyond ``max_bytes``."""
    if codec == 1:
        return _gzip(data, max_bytes)
    if codec == 2:
        return _snappy(data, max_bytes)
    if codec == 3:
        return _growing(cramjam.lz4.decompress_into, "lz4", data, max_bytes)
    if codec == 4:
        return _growing(cramjam.zstd.decompress_into, "zstd", data, max_bytes)
    raise InflationError(f"codec {codec} is unknown")


def _gzip(data: bytes, max_bytes: int) -> bytes:
    view = memoryview(data)
    parts: list[bytes] = []
    size = position = 0
    for _ in range(_MAX_FRAMES + 1):
        if position == len(view):
            return b"".join(parts)
        member = zlib.decompressobj(_GZIP_WINDOW_BITS)
        while not member.eof:
            # In pieces: a member copies all input after its end.
            piece = view[position : position + _PIECE_BYTES]
            try:
                # One byte above the limit tells "exactly the limit" from "more".
                part = member.decompress(piece, max_bytes - size + 1)
            except zlib.error as error:
                raise InflationError(f"gzip: {error}") from None
            read_bytes = len(piece) - len(member.unused_data) - len(member.unconsumed_tail)
            if not part and not read_bytes:
                raise InflationError("gzip: the stream ends early")
            position += read_bytes
            size += len(part)
            if size > max_bytes:
                raise _too_large("gzip", max_bytes)
            parts.append(part)
    raise _too_many_frames("gzip")


def _snappy(data: bytes, max_bytes: int) -> bytes:
    if not data.startswith(_XERIAL_MAGIC):
        return _snappy_block(data, max_bytes)
    parts: list[bytes] = []
    position, size = _XERIAL_HEADER_BYTES, 0
    for _ in range(_MAX_FRAMES + 1):
        if position >= len(data):
            return b"".join(parts)
        end = position + 4 + int.from_bytes(data[position : position + 4], "big")
        if not position + 4 < end <= len(data):
            raise InflationError("snappy: a block of the xerial framing ends early")
        part = _snappy_block(data[position + 4 : end], max_bytes - size)
        size += len(part)
        parts.append(part)
        position = end
    raise _too_many_frames("snappy")


def _snappy_block(block: bytes, max_bytes: int) -> bytes:
    try:
        size = cramjam.snappy.decompress_raw_len(block)
        if size > max_bytes:
            raise _too_large("snappy", max_bytes)
        return bytes(cramjam.snappy.decompress_raw(block, output_len=size)) if size else b""
    except cramjam.DecompressionError as error:
        raise InflationError(f"snappy: {error}") from None


def _growing(into: _Into, name: str, data: bytes, max_bytes: int) -> bytes:
    """Decompress into a buffer that starts small: most batches are small, and zeroing a large buffer costs time."""
    guess = min(max_bytes, max(_FIRST_GUESS_BYTES, _GUESS_FACTOR * len(data)))
    while True:
        buffer = bytearray(guess)
        try:
            size = into(data, buffer)
        except cramjam.DecompressionError as error:
            if _BUFFER_FULL not in str(error):
                raise InflationError(f"{name}: {error}") from None
            if guess >= max_bytes:
                raise _too_large(name, max_bytes) from None
            guess = min(max_bytes, _GUESS_FACTOR * guess)
            continue
        del buffer[size:]
        return bytes(buffer)


def _too_many_frames(name: str) -> InflationError:
    return InflationError(f"{name}: more than {_MAX_FRAMES} parts")


def _too_large(name: str, max_bytes: int) -> InflationError:
    return InflationError(f"{name}: more than {max_bytes} bytes once inflated", too_large=True)
