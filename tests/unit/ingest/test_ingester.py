"""What becomes of a document whose ingestion fails: it is put off, longer each time, and given up in the end."""

from typing import Any

import numpy as np
import pytest

from fairlane_server.retrieval.embedder import EmbedderError
from fairlane_server.retrieval.parsers import DocumentFormat, DocumentLimits
from fairlane_server.store_error import StoreError
from producers.backfill.errors import JobFailedError, UnavailableError
from producers.ingest.ingester import MOST_RETRIES, Ingester, IngestPolicy, SharedEmbedder
from producers.ingest.work_store import Upload


class NoEmbedder:
    name, dimensions = "none", 2

    def embed(self, texts: Any) -> Any:
        return np.zeros((len(texts), 2), dtype=np.float32)

    def close(self) -> None: ...


class Uploads:
    """The queue: what was given back, and after which time; what failed, and why."""

    def __init__(self) -> None:
        self.given_back: list[float] = []
        self.failed: list[str] = []

    def release(self, upload: Upload, after_s: float) -> None:
        self.given_back.append(after_s)

    def fail(self, upload: Upload, reason: str) -> bool:
        self.failed.append(reason)
        return True

    def close(self) -> None: ...


class Refusing:
    """Collections that always fail in this way."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def get(self, *_: object) -> None:
        raise self._error

    def close(self) -> None: ...


def upload(retries: int) -> Upload:
    names = ("acme", "upload-1", "handbook", 7, "a.md")
    return Upload(*names, DocumentFormat.MARKDOWN, 10, token=1, attempts=1, retries=retries)


@pytest.mark.parametrize(
    "error", [StoreError("secret host"), EmbedderError("e"), UnavailableError("u"), JobFailedError("j")]
)
def test_a_document_that_can_never_be_stored_is_put_off_for_longer_and_then_fails(error: Exception) -> None:
    uploads: Any = Uploads()
    collections: Any = Refusing(error)
    policy = IngestPolicy("files", 1_000, DocumentLimits())
    with Ingester(uploads, collections, SharedEmbedder(NoEmbedder()), policy) as ingester:
        outcomes = [ingester.ingest(upload(retries), lambda: False) for retries in range(MOST_RETRIES + 1)]
    assert outcomes == ["later"] * MOST_RETRIES + ["failed"]
    assert uploads.failed == ["could not be embedded and stored in 301 tries: upload it again"]
    assert uploads.given_back[0] <= 2
    assert all(30 < after_s <= 64 for after_s in uploads.given_back[5:6])
    assert all(150 <= after_s <= 300 for after_s in uploads.given_back[8:])
    assert sum(uploads.given_back) > 12 * 3_600, "an outage of half a day fails no document"
