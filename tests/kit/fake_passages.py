"""A store and an embedder for tests of what is done with them; the real ones have suites of their own."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from fairlane_server.retrieval.embedder import FloatArray
from fairlane_server.retrieval.store import Collection, CollectionNotFoundError, Found, Hit

EMBEDDER = "words-1"


def hit(name: str, tokens: int = 10, score: float = 1.0) -> Hit:
    return Hit(name, f"{name}.md", "", f"the text of {name}", tokens, score)


def collection(tenant: str = "acme", name: str = "handbook", version: int = 1, embedder: str = EMBEDDER) -> Collection:
    return Collection(tenant, name, embedder, 2, version)


@dataclass
class FakePassages:
    """Finds what the test says; whatever is in ``failures`` is raised instead, once each, and while ``hangs`` is set
    nothing is answered."""

    collections: dict[tuple[str, str], Collection] = field(default_factory=dict)
    nearest: tuple[Hit, ...] = ()
    matching: tuple[Hit, ...] | None = ()
    failures: list[Exception] = field(default_factory=list)
    hangs: bool = False
    searches: list[tuple[str, str | None, int]] = field(default_factory=list)
    """Tenant, text and limit of each."""
    timeouts_s: list[float] = field(default_factory=list)
    look_ups: int = 0
    late: bool = False
    """Searches are, and nothing else."""
    missing: bool = False
    """Passages are, and no collection."""
    hangs_once: bool = False
    """The next search does."""

    def add(self, *made: Collection) -> None:
        self.collections.update({(one.tenant, one.name): one for one in made})

    async def collection(self, tenant: str, name: str) -> Collection:
        self.look_ups += 1
        await self._answer()
        if (tenant, name) not in self.collections:
            raise CollectionNotFoundError("no such collection")
        return self.collections[tenant, name]

    async def search(
        self, collection: Collection, vector: FloatArray, text: str | None, limit: int, timeout_s: float
    ) -> Found:
        self.searches.append((collection.tenant, text, limit))
        self.timeouts_s.append(timeout_s)
        if self.missing:
            raise CollectionNotFoundError("there are no passages")
        if self.hangs_once or self.late:
            self.hangs_once = False
            async with asyncio.timeout(timeout_s):
                await asyncio.Event().wait()
        await self._answer()
        return Found(self.nearest[:limit], None if text is None or self.matching is None else self.matching[:limit])

    async def _answer(self) -> None:
        if self.failures:
            raise self.failures.pop(0)
        if self.hangs:
            await asyncio.Event().wait()


@dataclass
class FakeEmbedder:
    name: str = EMBEDDER
    dimensions: int = 2
    failures: list[Exception] = field(default_factory=list)
    hangs: bool = False

    async def embed_query(self, text: str) -> FloatArray:
        if self.hangs:
            await asyncio.Event().wait()
        if self.failures:
            raise self.failures.pop(0)
        return np.array([1.0, 0.0], dtype=np.float32)

    async def aclose(self) -> None: ...


@dataclass
class FakeRetrievalCache:
    entries: dict[tuple[object, ...], tuple[Hit, ...]] = field(default_factory=dict)

    async def get(self, collection: Collection, mode: str, width: int, query: str) -> tuple[Hit, ...] | None:
        return self.entries.get((collection.tenant, collection.name, collection.version, mode, width, query))

    async def put(self, collection: Collection, mode: str, width: int, query: str, hits: Sequence[Hit]) -> None:
        self.entries[collection.tenant, collection.name, collection.version, mode, width, query] = tuple(hits)
