"""How often something was asked for lately, in a few bytes. Pure."""

_ROWS = 4
_MOST = 15
_HALVED = bytes(count >> 1 for count in range(256))
_INDEX_BYTES = 4


class FrequencySketch:
    """A count-min sketch with small counters that are halved now and then, so that old fame fades (Einziger, Friedman
    and Manes, "TinyLFU: A Highly Efficient Cache Admission Policy", ACM Transactions on Storage 13(4), 2017).

    It never says less than what was counted since the last halving, up to 15; what shares all its counters makes it say
    more.

    Args:
        width: counters per row, a power of two; fit for about a fourth as many things.
    """

    def __init__(self, width: int = 1_024) -> None:
        if width < 1 or width & (width - 1):
            raise ValueError(f"{width} is no power of two")
        self._mask = width - 1
        self._rows = [bytearray(width) for _ in range(_ROWS)]
        self._sample = 8 * width
        self._counted = 0

    def count(self, digest: bytes) -> None:
        """It was asked for once more. ``digest`` has at least 16 bytes that look random."""
        places = self._places(digest)
        least = min(row[place] for row, place in zip(self._rows, places, strict=True))
        if least < _MOST:
            # Only the least counters say anything new (conservative update).
            for row, place in zip(self._rows, places, strict=True):
                if row[place] == least:
                    row[place] += 1
        self._counted += 1
        if self._counted >= self._sample:
            self._rows = [row.translate(_HALVED) for row in self._rows]
            self._counted //= 2

    def estimate(self, digest: bytes) -> int:
        """How often, from 0 to 15."""
        return min(row[place] for row, place in zip(self._rows, self._places(digest), strict=True))

    def _places(self, digest: bytes) -> list[int]:
        return [
            int.from_bytes(digest[start : start + _INDEX_BYTES], "big") & self._mask
            for start in range(0, _ROWS * _INDEX_BYTES, _INDEX_BYTES)
        ]
