"""Requests that go on to admission later than the batch they arrived in."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from stream_processors.dispatcher.queued_request import Candidate


@dataclass(slots=True)
class AdmissionInbox:
    """Duplicates whose first request was rejected for now, and response cache misses. ``wake`` is set for each."""

    wake: asyncio.Event
    _candidates: list[Candidate] = field(default_factory=list)

    def put(self, candidate: Candidate) -> None:
        self._candidates.append(candidate)
        self.wake.set()

    def take(self, most: int, now_ms: int) -> list[Candidate]:
        """Remove and return the oldest, admitted at ``now_ms``: they may have waited since they were classified."""
        taken = self._candidates[:most]
        del self._candidates[:most]
        return [replace(one, queued=replace(one.queued, admitted_at_ms=now_ms)) for one in taken]

    def keep(self, wanted: Callable[[Candidate], bool]) -> None:
        """Drop all others."""
        self._candidates = [one for one in self._candidates if wanted(one)]

    def __len__(self) -> int:
        return len(self._candidates)

    def __iter__(self) -> Iterator[Candidate]:
        return iter(self._candidates)
