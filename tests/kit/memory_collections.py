"""A CollectionStore in memory, an embedder that needs no model, and documents to put there."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from fairlane_server.retrieval.embedder import FloatArray
from fairlane_server.retrieval.store import Collection, CollectionExistsError, CollectionNotFoundError, NewDocument


class MemoryCollections:
    """Keeps collections as the real store does; remembers what was put, and how often an index was asked for."""

    def __init__(self) -> None:
        self.documents: dict[tuple[str, str], dict[str, NewDocument]] = {}
        self.puts: list[list[str]] = []
        self.index_builds = 0
        self.closed = False
        self._collections: dict[tuple[str, str], Collection] = {}
        self._version = 0
        self._number = 0

    def close(self) -> None:
        self.closed = True

    def create(self, tenant: str, name: str, embedder: str, dimensions: int) -> Collection:
        if (tenant, name) in self._collections:
            raise CollectionExistsError(f"there is a collection {name!r} already")
        self._number += 1
        self._collections[tenant, name] = Collection(
            tenant, name, embedder, dimensions, self._next_version(), number=self._number
        )
        self.documents[tenant, name] = {}
        return self._collections[tenant, name]

    def get(self, tenant: str, name: str) -> Collection:
        found = self._collections.get((tenant, name))
        if found is None:
            raise CollectionNotFoundError(f"there is no collection {name!r}")
        held = self.documents[tenant, name].values()
        return replace(found, documents=len(held), passages=sum(len(document.passages) for document in held))

    def list(self, tenant: str) -> Sequence[Collection]:
        return [self.get(*key) for key in sorted(self._collections) if key[0] == tenant]

    def delete(self, tenant: str, name: str) -> Collection:
        found = self.get(tenant, name)
        del self._collections[tenant, name], self.documents[tenant, name]
        return found

    def content_hashes(self, tenant: str, name: str) -> Mapping[str, str]:
        self.get(tenant, name)
        return {source: document.content_hash for source, document in self.documents[tenant, name].items()}

    def put(self, tenant: str, name: str, documents: Sequence[NewDocument], *, number: int | None = None) -> None:
        found = self._meant(tenant, name, number)
        for document in documents:
            assert document.vectors.shape == (len(document.passages), found.dimensions)
        self.puts.append([document.source for document in documents])
        self.documents[tenant, name].update({document.source: document for document in documents})
        self._changed(tenant, name)

    def remove(
        self, tenant: str, name: str, sources: Sequence[str] | Mapping[str, str], *, number: int | None = None
    ) -> int:
        self._meant(tenant, name, number)
        held = self.documents[tenant, name]
        wanted = sources if isinstance(sources, Mapping) else dict.fromkeys(sources)
        gone = [source for source in wanted if source in held and wanted[source] in {None, held[source].content_hash}]
        for source in gone:
            del held[source]
        if gone:
            self._changed(tenant, name)
        return len(gone)

    def build_index(self, tenant: str, name: str, *, number: int | None = None) -> bool:
        self._meant(tenant, name, number)
        self.index_builds += 1
        return False

    def _meant(self, tenant: str, name: str, number: int | None) -> Collection:
        found = self.get(tenant, name)
        if number not in {None, found.number}:
            raise CollectionNotFoundError(f"collection {name!r} was deleted meanwhile")
        return found

    def _changed(self, tenant: str, name: str) -> None:
        self._collections[tenant, name] = replace(self._collections[tenant, name], version=self._next_version())

    def _next_version(self) -> int:
        self._version += 1
        return self._version


class LetterEmbedder:
    """A text's vector is how often each letter stands in it. Its name and what it was asked are there to see."""

    dimensions = 26

    def __init__(self, name: str = "letters") -> None:
        self.name = name
        self.sizes: list[int] = []
        self.texts: list[str] = []
        self.closed = threading.Event()

    def embed(self, texts: Sequence[str]) -> FloatArray:
        self.sizes.append(len(texts))
        self.texts += texts
        counts = [[text.lower().count(chr(97 + letter)) for letter in range(26)] for text in texts]
        vectors = np.array(counts, dtype=np.float32).reshape(len(texts), 26)
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        return (vectors / np.where(lengths > 0, lengths, 1)).astype(np.float32)

    def close(self) -> None:
        self.closed.set()
