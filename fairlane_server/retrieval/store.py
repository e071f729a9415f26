"""The ports of passage stores: one to write through, one to search."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from fairlane_server.retrieval.embedder import FloatArray
from fairlane_server.store_error import StoreError


class CollectionNotFoundError(StoreError):
    """The tenant has no collection of this name."""


class CollectionExistsError(StoreError):
    """The tenant has a collection of this name already."""


class TooManyCollectionsError(StoreError):
    """The tenant has as many collections as it may."""


@dataclass(frozen=True, slots=True)
class Collection:
    """A named set of documents of one tenant, with vectors of one ``embedder``.

    Every change raises ``version``, which is part of all cache keys; neither it nor the store's ``number`` is used
    again, not even after the collection was deleted and created anew.
    """

    tenant: str
    name: str
    embedder: str
    dimensions: int
    version: int
    documents: int = 0
    passages: int = 0
    created_at_ms: int = 0
    updated_at_ms: int = 0
    number: int = 0


@dataclass(frozen=True, slots=True)
class NewPassage:
    """A passage to be stored. ``heading`` is the path of headings above it, ``tokens`` counts both."""

    text: str
    heading: str
    tokens: int


@dataclass(frozen=True, slots=True)
class NewDocument:
    """A document with its passages in order; ``source`` names it within its collection (a path)."""

    source: str
    content_hash: str
    title: str
    passages: Sequence[NewPassage]
    vectors: FloatArray
    """Of shape (passages, dimensions)."""
    size_bytes: int = 0
    """Of the file; 0: not known."""


@dataclass(frozen=True, slots=True)
class Hit:
    """A passage that was found; a higher score is better, and scores of one list alone can be compared."""

    passage_id: str
    source: str
    heading: str
    text: str
    tokens: int
    score: float


@dataclass(frozen=True, slots=True)
class Found:
    """Two ranked lists, best first; ``matching`` is None when full text was not asked for, or came too late."""

    nearest: tuple[Hit, ...]
    matching: tuple[Hit, ...] | None


class CollectionStore(Protocol):
    """Writes. Every call acts for one tenant and sees nothing of any other. Raises StoreError.

    With ``number``, that very collection is meant: when it was deleted, and even if there is another of its name now,
    nothing is written, and CollectionNotFoundError raised.
    """

    def create(self, tenant: str, name: str, embedder: str, dimensions: int) -> Collection:
        """Raises CollectionExistsError."""

    def get(self, tenant: str, name: str) -> Collection:
        """Raises CollectionNotFoundError."""

    def list(self, tenant: str) -> Sequence[Collection]:
        """By name."""

    def delete(self, tenant: str, name: str) -> Collection:
        """The collection with everything in it; returns it as it was. Raises CollectionNotFoundError."""

    def content_hashes(self, tenant: str, name: str) -> Mapping[str, str]:
        """The content hash of every document, by source. Raises CollectionNotFoundError."""

    def put(self, tenant: str, name: str, documents: Sequence[NewDocument], *, number: int | None = None) -> None:
        """Replace these documents, or add them, in one transaction. Raises CollectionNotFoundError."""

    def remove(
        self, tenant: str, name: str, sources: Sequence[str] | Mapping[str, str], *, number: int | None = None
    ) -> int:
        """Remove these documents; returns how many were there. Of a mapping, those whose content hash is still the one
        given. Raises CollectionNotFoundError."""

    def build_index(self, tenant: str, name: str, *, number: int | None = None) -> bool:
        """Build the index of the loaded passages if that pays and it is missing; queries continue during the build.
        Returns whether it was built. Raises CollectionNotFoundError."""


class VectorStore(Protocol):
    """Searches, within an event loop. Every call acts for one tenant and sees nothing of any other."""

    async def collection(self, tenant: str, name: str) -> Collection:
        """Raises CollectionNotFoundError, StoreError."""

    async def search(
        self, collection: Collection, vector: FloatArray, text: str | None, limit: int, timeout_s: float
    ) -> Found:
        """The ``limit`` nearest passages, and the ``limit`` that match the text best if one is given.

        Full text that is not there after ``timeout_s`` is left out; without the nearest passages by then it raises
        TimeoutError. Raises CollectionNotFoundError, StoreError. The caller may be cancelled at any time.
        """
