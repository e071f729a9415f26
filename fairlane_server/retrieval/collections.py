"""A tenant's collections of documents, to create, fill, look at and delete.

>>> from fairlane_server.retrieval.collections import open_collections
>>> from fairlane.settings import Settings
>>> with open_collections(Settings(), tenant="acme") as collections:
...     collections.create("handbook")
...     report = collections.ingest("handbook", ["docs"])
...     print(report.new, report.passages, report.failures)
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import cache

from fairlane.names import is_name
from fairlane.settings import Settings
from fairlane_server.retrieval.embedder import Embedder
from fairlane_server.retrieval.ingestion import Ingestion, IngestOptions, IngestReport
from fairlane_server.retrieval.sources import find_sources
from fairlane_server.retrieval.store import Collection, CollectionStore
from fairlane_server.store_error import ReportableError


class CollectionNameError(ValueError, ReportableError):
    """No collection can have this name."""


class Collections:
    """The collections of one tenant. A collection of another tenant is not found, as if it did not exist."""

    def __init__(
        self,
        store: CollectionStore,
        load_embedder: Callable[[], Embedder],
        tenant: str,
        options: IngestOptions | None = None,
    ) -> None:
        """``load_embedder`` is called at the first use: listing and deleting need no model."""
        if not is_name(tenant):
            raise ValueError(f"no tenant can have the name {tenant!r}")
        self._store = store
        self._embedder = cache(load_embedder)
        self._tenant = tenant
        self._options = options or IngestOptions()

    def create(self, name: str) -> Collection:
        """An empty collection for vectors of this embedder.

        Raises ValueError for what cannot be its name, CollectionExistsError, StoreError, EmbedderError.
        """
        if not is_name(name):
            raise CollectionNameError(
                f"no collection can have the name {name!r}: up to 39 of a-z, 0-9 and -, and no - at the beginning"
            )
        embedder = self._embedder()
        return self._store.create(self._tenant, name, embedder.name, embedder.dimensions)

    def get(self, name: str) -> Collection:
        return self._store.get(self._tenant, name)

    def list(self) -> Sequence[Collection]:
        return self._store.list(self._tenant)

    def documents(self, name: str) -> Sequence[str]:
        """The sources of its documents, sorted. Raises CollectionNotFoundError, StoreError."""
        return sorted(self._store.content_hashes(self._tenant, name))

    def delete(self, name: str) -> Collection:
        """Delete it with its documents and passages; returns it as it was. Its version is not used again, so cached
        passages are not found any more. Raises CollectionNotFoundError, StoreError."""
        return self._store.delete(self._tenant, name)

    def remove(self, name: str, sources: Sequence[str]) -> int:
        """Remove documents by their source; returns how many were there. Raises CollectionNotFoundError, StoreError."""
        return self._store.remove(self._tenant, name, sources)

    def ingestion(self, name: str) -> Ingestion:
        """To plan and to run an ingest apart from one another.

        Raises EmbedderMismatchError, CollectionNotFoundError, StoreError, EmbedderError.
        """
        return Ingestion(self._store, self._embedder(), self.get(name), self._options)

    def ingest(
        self,
        name: str,
        given: Sequence[str | os.PathLike[str]],
        *,
        prune: bool = False,
        follow_links: bool = False,
        progress: Callable[[int, int], None] | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> IngestReport:
        """Ingest files, folders and globs into the collection; unchanged files are skipped.

        A file that cannot be taken is a failure in the report, and the others are taken. After an interrupt, whether by
        ``stop`` or an exception, what was stored stays, and the same call goes on from there. ``prune`` removes the
        documents whose files are not in the folder, which must then be the only thing given. ``follow_links`` takes
        what links lead to outside of a given folder. ``progress`` is called with the number of files that are done, and
        of all.

        Raises SourcesError, IngestError, CollectionNotFoundError, StoreError, EmbedderError.
        """
        ingestion = self.ingestion(name)
        plan = ingestion.plan(find_sources(given, follow_links=follow_links), prune=prune)

        def tell(done: int) -> None:
            if progress is not None:
                progress(done, len(plan.due))

        return ingestion.run(plan, progress=tell, stop=stop)


@contextmanager
def open_collections(settings: Settings, tenant: str, options: IngestOptions | None = None) -> Iterator[Collections]:
    """A tenant's collections in the Postgres of POSTGRES_DSN, embedded as RETRIEVAL_EMBEDDER says.

    Nothing is connected or loaded before it is needed. Raises ValueError for what cannot be a tenant's name.
    """
    from fairlane_server.retrieval.embedders import embedder_for
    from fairlane_server.retrieval.pgvector_store import PgVectorCollections

    store = PgVectorCollections(settings.postgres_dsn.get_secret_value())
    with closing(store), ExitStack() as opened:
        yield Collections(store, lambda: opened.enter_context(closing(embedder_for(settings))), tenant, options)
