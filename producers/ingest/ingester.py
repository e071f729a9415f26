"""Ingestion of one upload: read it, divide it in a child process, embed it, store its passages."""

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import PurePosixPath

import numpy as np

from fairlane.backoff import Backoff
from fairlane.closing import Closing
from fairlane.logs import get_logger
from fairlane_server.retrieval.chunking import Chunking
from fairlane_server.retrieval.dividing import DividedDocument, DividingProcess
from fairlane_server.retrieval.embedder import Embedder, EmbedderError, FloatArray, TextRefusedError
from fairlane_server.retrieval.ingestion import EmbedderMismatchError, check_embedder, content_hash, embedded_texts
from fairlane_server.retrieval.parsers import DocumentLimits, UnreadableError
from fairlane_server.retrieval.pgvector_store import PgVectorCollections
from fairlane_server.retrieval.store import CollectionNotFoundError, NewDocument
from fairlane_server.store_error import StoreError
from producers.backfill.errors import JobFailedError, LeaseLostError, NoSuchInputError, UnavailableError
from producers.backfill.files import blob_of, file_url
from producers.ingest.work_store import PassageQuotaError, Upload, WorkStore

log = get_logger(__name__)

MOST_ATTEMPTS = 3
_TEXTS_AT_A_TIME = 512
MOST_RETRIES = 300
_RETRY = Backoff(first_s=2.0, longest_s=300.0)
"""An embedder or Postgres may be unavailable for some 18 hours, and what can never be stored does not stay for ever."""


@dataclass(frozen=True, slots=True)
class IngestPolicy:
    """How documents are ingested. ``files_url`` is where the gateway stored their content."""

    files_url: str
    most_passages: int
    limits: DocumentLimits
    chunking: Chunking = field(default_factory=Chunking)


class SharedEmbedder:
    """An embedder that several threads use, one at a time; its owner closes the one within."""

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder
        self._lock = threading.Lock()
        self.name, self.dimensions = embedder.name, embedder.dimensions

    def embed(self, texts: Sequence[str]) -> FloatArray:
        """See Embedder."""
        with self._lock:
            return self._embedder.embed(texts)

    def close(self) -> None:
        """Do nothing: another thread may be embedding."""


class Ingester(Closing):
    """Ingests one upload after another. For one thread; ``store`` and ``collections`` are its own."""

    def __init__(
        self, store: WorkStore, collections: PgVectorCollections, embedder: SharedEmbedder, policy: IngestPolicy
    ) -> None:
        self._store = store
        self._collections = collections
        self._embedder = embedder
        self._policy = policy
        self._divider = DividingProcess(policy.limits, policy.chunking)

    def close(self) -> None:
        self._divider.close()
        self._collections.close()
        self._store.close()

    def ingest(self, upload: Upload, is_lost: Callable[[], bool]) -> str:
        """Carry an upload to its end and record it. Returns the outcome: ``done``, ``failed``, ``later`` or ``lost``.

        ``is_lost`` is asked between steps: once it says so, nothing is stored. Raises UnavailableError and
        JobFailedError if the outcome cannot be recorded; its lease then ends.
        """
        try:
            self._ingest(upload, is_lost)
        except LeaseLostError:
            return "lost"
        except (UnreadableError, EmbedderMismatchError, TextRefusedError, PassageQuotaError, NoSuchInputError) as error:
            reason = "its content is no longer stored: upload it again" if _is_gone(error) else str(error)
            return "failed" if self._store.fail(upload, reason) else "lost"
        except CollectionNotFoundError:
            return "lost"
        except (StoreError, EmbedderError, UnavailableError, JobFailedError) as error:
            if upload.retries >= MOST_RETRIES:
                log.error("document_given_up", upload=upload.upload_id, tenant=upload.tenant, reason=str(error))
                reason = f"could not be embedded and stored in {MOST_RETRIES + 1} tries: upload it again"
                return "failed" if self._store.fail(upload, reason) else "lost"
            after_s = _RETRY.delay_s(upload.retries + 1, random.random())  # noqa: S311 - jitter, no secret
            log.warning("document_later", upload=upload.upload_id, tenant=upload.tenant, reason=str(error))
            self._store.release(upload, after_s)
            return "later"
        self._index(upload)
        return "done"

    def _ingest(self, upload: Upload, is_lost: Callable[[], bool]) -> None:
        if upload.attempts > MOST_ATTEMPTS:
            raise UnreadableError(f"the process that ingests it ended {MOST_ATTEMPTS} times while it was at it")
        collection = self._collections.get(upload.tenant, upload.collection)
        if collection.number != upload.collection_id:
            raise LeaseLostError
        check_embedder(collection, self._embedder)
        data = self._content(upload)
        divided = self._divider.divide(upload.format, data)
        vectors = self._vectors(divided, is_lost)
        title = divided.title or PurePosixPath(upload.source).stem
        digest = content_hash(data, self._policy.chunking, self._embedder.name)
        document = NewDocument(upload.source, digest, title, divided.passages, vectors, len(data))
        confirm = partial(self._store.confirm, upload=upload, most_passages=self._policy.most_passages)
        self._collections.put(
            upload.tenant, upload.collection, [document], number=upload.collection_id, confirm=confirm
        )

    def _content(self, upload: Upload) -> bytes:
        blob = blob_of(file_url(self._policy.files_url, upload.tenant, upload.upload_id))
        fingerprint = blob.fingerprint()
        if fingerprint.size_bytes > self._policy.limits.max_file_bytes:
            raise UnreadableError(
                f"has {fingerprint.size_bytes:,} bytes, more than a document may have "
                f"({self._policy.limits.max_file_bytes:,})"
            )
        return blob.read(0, fingerprint.size_bytes, fingerprint)

    def _vectors(self, divided: DividedDocument, is_lost: Callable[[], bool]) -> FloatArray:
        texts, parts = embedded_texts(divided.passages), []
        for start in range(0, len(texts), _TEXTS_AT_A_TIME):
            if is_lost():
                raise LeaseLostError
            parts.append(self._embedder.embed(texts[start : start + _TEXTS_AT_A_TIME]))
        if is_lost():
            raise LeaseLostError
        return np.concatenate(parts)

    def _index(self, upload: Upload) -> None:
        """Build the collection's index if that pays. The document is stored; the next one tries again."""
        try:
            self._collections.build_index(upload.tenant, upload.collection, number=upload.collection_id)
        except StoreError as error:
            log.warning("index_not_built", tenant=upload.tenant, collection=upload.collection_id, reason=str(error))


def _is_gone(error: Exception) -> bool:
    return isinstance(error, NoSuchInputError)
