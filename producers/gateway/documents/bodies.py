"""Bodies of the routes of collections and documents."""

from typing import Annotated, Literal

from pydantic import Field

from fairlane_server.retrieval.store import Collection
from producers.gateway.native.response_bodies import Page, ResponseBody
from producers.gateway.openapi import CREATED_S
from producers.ingest.document import Document, DocumentStatus
from producers.openai_api.request_models import ClosedBody

_AT_MS = 1_000 * CREATED_S
DOCUMENT_ID = "doc-0a1b2c3d4e5f60718293a4b5c6d7e8f9"


class NewCollection(ClosedBody):
    """Body of ``POST /v1/collections``."""

    name: Annotated[str, Field(min_length=1, max_length=39, description="Of a-z, 0-9 and -, no - at the beginning")]


class CollectionAnswer(ResponseBody):
    """A collection of documents, by which requests can be answered (`retrieval.collection`)."""

    name: str
    embedder: str
    dimensions: int
    version: int = Field(description="Raised by every change; part of the keys of all caches")
    documents: int
    passages: int
    created_at_ms: int
    updated_at_ms: int

    @classmethod
    def of(cls, collection: Collection) -> "CollectionAnswer":
        """The answer of a stored collection."""
        return cls.model_validate(collection)


class CollectionPage(Page[CollectionAnswer]):
    """Collections by name."""


class DeletedCollection(ResponseBody):
    """Confirmation: its rows are gone, and from a second later no request finds anything of it."""

    name: str
    deleted: Literal[True] = True
    documents: int
    passages: int


class DocumentAnswer(ResponseBody):
    """A document, without its content."""

    id: str = Field(description="Stays the same when a document of this name is uploaded again")
    name: str
    status: DocumentStatus = Field(description="Of the newest upload")
    bytes: int
    passages: int = Field(description="That requests find; of the version before until the newest is `done`")
    reason: str | None = Field(None, description="Why the newest upload failed")
    uploaded_at_ms: int | None = Field(None, description="Of the newest upload, until it is done")
    stored_at_ms: int | None = Field(None, description="Of the passages")

    @classmethod
    def of(cls, document: Document) -> "DocumentAnswer":
        """The answer of a known document."""
        return cls(
            id=document.document_id,
            name=document.name,
            status=document.status,
            bytes=document.size_bytes,
            passages=document.passages,
            reason=document.reason,
            uploaded_at_ms=document.uploaded_at_ms,
            stored_at_ms=document.stored_at_ms,
        )


class DocumentPage(Page[DocumentAnswer]):
    """Documents by name."""


class DeletedDocument(ResponseBody):
    """Confirmation: its rows are gone, and from a second later no request finds anything of it."""

    id: str
    deleted: Literal[True] = True


COLLECTION = CollectionAnswer(
    name="handbook",
    embedder="all-minilm-l6-v2-static:0a1b2c3d",
    dimensions=256,
    version=7,
    documents=3,
    passages=120,
    created_at_ms=_AT_MS,
    updated_at_ms=_AT_MS + 60_000,
)
COLLECTIONS = CollectionPage(data=(COLLECTION,), has_more=False)
DELETED_COLLECTION = DeletedCollection(name="handbook", documents=3, passages=120)
PENDING = DocumentAnswer(
    id=DOCUMENT_ID,
    name="guides/returns.pdf",
    status=DocumentStatus.PENDING,
    bytes=20_480,
    passages=0,
    uploaded_at_ms=_AT_MS,
)
DONE = DocumentAnswer(
    id=DOCUMENT_ID,
    name="guides/returns.pdf",
    status=DocumentStatus.DONE,
    bytes=20_480,
    passages=12,
    stored_at_ms=_AT_MS + 900,
)
DOCUMENTS = DocumentPage(data=(DONE,), has_more=False)
DELETED_DOCUMENT = DeletedDocument(id=DOCUMENT_ID)
