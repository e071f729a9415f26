"""Count-min sketch of recent access frequency. Pure."""

_ROWS = 4
_MOST = 15
_HALVED = bytes(count >> 1 for count in range(256))
_INDEX_BYTES = 4


class FrequencySketch:
    """A count-min sketch with counters up to 15 that are halved periodically, so that old popularity fades (Einziger,
    Friedman and Manes, "TinyLFU: A Highly Efficient Cache Admission Policy", ACM Transactions on Storage 13(4), 2017).

    An estimate is never below the count since the last halving, up to 15; hash collisions in all rows raise it.

    Args:
        width: counters per row, a power of two; suits about width / 4 distinct keys.
    """

    def __init__(self, width: int = 1_024) -> None:
        if width < 1 or width & (width - 1):
            raise ValueError(f"{width} is no power of two")
        self._mask = width - 1
        self._rows = [bytearray(width) for _ in range(_ROWS)]
        self._sample = 8 * width
        self._counted = 0

    def count(self, digest: bytes) -> None:
        """Count one access. ``digest`` has at least 16 uniformly distributed bytes."""
        places = self._places(digest)
        least = min(row[place] for row, place in zip(self._rows, places, strict=True))
        if least < _MOST:
            # Conservative update: only the smallest counters are raised.
            for row, place in zip(self._rows, places, strict=True):
                if row[place] == least:
                    row[place] += 1
        self._counted += 1
        if self._counted >= self._sample:
            self._rows = [row.translate(_HALVED) for row in self._rows]
            self._counted //= 2

    def estimate(self, digest: bytes) -> int:
        """The estimated access count, from 0 to 15."""
        return min(row[place] for row, place in zip(self._rows, self._places(digest), strict=True))

    def _places(self, digest: bytes) -> list[int]:
        return [
            int.from_bytes(digest[start : start + _INDEX_BYTES], "big") & self._mask
            for start in range(0, _ROWS * _INDEX_BYTES, _INDEX_BYTES)
        ]
