"""The versions that the consumers of each pool have loaded, without what a moment of silence would say. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

LOST_AFTER_MS = 10_000
"""A version that no consumer reports counts as loaded for so long: heartbeats may be late, an engine restarts."""


@dataclass(slots=True)
class LoadedVersions:
    """For one thread."""

    by_pool: Mapping[str, Mapping[str, float | None] | None] = field(default_factory=dict)
    """As ``PoolCapacity.loaded``, of each pool that has ever reported: one without consumers is expected back with what
    it had."""
    _seen_at_ms: dict[tuple[str, str], int] = field(default_factory=dict)

    def follow(self, reported: Mapping[str, Mapping[str, float | None] | None], now_ms: int) -> bool:
        """Take what the live consumers of each pool report. Returns whether other versions are loaded than before."""
        by_pool, is_changed = dict(self.by_pool), False
        for pool, loaded in reported.items():
            before = by_pool.get(pool)
            if loaded is None:
                by_pool[pool] = None
                continue
            # What a consumer has given up is known to be gone: nothing is waited for.
            kept = {version: part for version, part in loaded.items() if part != 0}
            for version in kept:
                self._seen_at_ms[pool, version] = now_ms
            for version, part in (before or {}).items():
                if version in kept:
                    continue
                if version not in loaded and now_ms - self._seen_at_ms[pool, version] < LOST_AFTER_MS:
                    kept[version] = part
                else:
                    del self._seen_at_ms[pool, version]
            is_changed = is_changed or before is None or _loaded(kept) != _loaded(before)
            by_pool[pool] = kept
        self.by_pool = by_pool
        return is_changed


def _loaded(parts: Mapping[str, float | None]) -> set[str]:
    return {version for version, part in parts.items() if part is not None}
