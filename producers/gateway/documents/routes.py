"""``/v1/collections``: a tenant's collections and their documents. ``python -m producers.ingest`` ingests them."""

import re
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from fairlane.names import is_name
from fairlane_server.retrieval.store import CollectionExistsError, TooManyCollectionsError
from producers.gateway.documents import bodies
from producers.gateway.documents.bodies import (
    CollectionAnswer,
    CollectionPage,
    DeletedCollection,
    DeletedDocument,
    DocumentAnswer,
    DocumentPage,
    NewCollection,
)
from producers.gateway.documents.deps import (
    CONFLICT,
    ERRORS,
    NO_EMBEDDER,
    QUOTA_REACHED,
    DocumentDeps,
    invalid,
    unknown_collection,
    unknown_document,
)
from producers.gateway.documents.uploads import uploaded
from producers.gateway.identity.identity import Identity, Permission
from producers.gateway.native.cursors import MOST_CURSOR_CHARS, Cursors
from producers.gateway.native.response_bodies import answered, page_of
from producers.gateway.openapi import READ_STATUSES, errors, taking
from producers.gateway.openapi import answered as documented
from producers.gateway.pipeline.call_context import current
from producers.gateway.sending import body_of
from producers.ingest.document import MEDIA_TYPES, MOST_NAME_BYTES, is_document_id
from producers.openai_api.body import parse
from producers.openai_api.errors import GatewayError

MOST_OF_PAGE = 100
_RAW = f"The document, with `name`; as well as {', '.join(MEDIA_TYPES)}"
_UPLOAD_PATH = re.compile(r"/v1/collections/[^/]{1,64}/documents")

CollectionName = Annotated[str, Path(description="Name of the collection", examples=["handbook"])]
DocumentId = Annotated[str, Path(description="Id of the document", examples=[bodies.DOCUMENT_ID])]
Name = Annotated[
    str | None,
    Query(
        min_length=1,
        max_length=MOST_NAME_BYTES,
        description="Name of the document; of a form, the file's own otherwise",
    ),
]
Limit = Annotated[int, Query(ge=1, le=MOST_OF_PAGE, description="Most entries of a page")]
Cursor = Annotated[str | None, Query(max_length=MOST_CURSOR_CHARS, description="`next_cursor` of the page before")]

_cursors = Cursors(str)


def is_upload_path(path: str) -> bool:
    """Whether calls of this path bring documents, which are streamed to disk."""
    return _UPLOAD_PATH.fullmatch(path) is not None


def router(deps: DocumentDeps) -> APIRouter:
    """All routes of collections and documents."""
    api = APIRouter(prefix="/v1/collections", tags=["collections"])
    _add_collections(api, deps)
    _add_documents(api, deps)
    return api


def _add_collections(api: APIRouter, deps: DocumentDeps) -> None:
    read = errors((*READ_STATUSES, 400), ERRORS, is_native=True)
    Reader = Annotated[str, deps.caller(Permission.DOCUMENTS_READ)]  # noqa: N806 - a type
    Writer = Annotated[str, deps.caller(Permission.DOCUMENTS_WRITE)]  # noqa: N806 - a type
    creator = deps.permitted(Permission.DOCUMENTS_WRITE)

    @api.post(
        "",
        status_code=201,
        summary="Create a collection",
        responses=documented(bodies.COLLECTION, "It was created", 201)
        | errors((*READ_STATUSES, 400, 409, 413), ERRORS, is_native=True),
        openapi_extra={"requestBody": taking(NewCollection, {"A collection": {"name": "handbook"}})["requestBody"]},
    )
    async def create_collection(request: Request, identity: Annotated[Identity, Depends(creator)]) -> Response:
        """Create an empty collection, for vectors of the deployment's embedder."""
        body = parse(NewCollection, await body_of(request))
        with deps.calls.taken(identity.tenant):
            made = await run_in_threadpool(_created, deps, identity.tenant, body.name)
        return answered(made, 201)

    @api.get("", summary="The collections", responses=documented(bodies.COLLECTIONS, "A page") | read)
    def list_collections(tenant: Reader, limit: Limit = 20, cursor: Cursor = None) -> Response:
        """Collections by name, with their numbers of documents and passages."""
        query = (tenant, "collections")
        behind = _cursors.decode(query, cursor) or ""
        with deps.collections() as store:
            found = [one for one in store.list(tenant) if one.name > behind]
        return page_of(
            *(CollectionPage, found, limit, CollectionAnswer.of), lambda last: _cursors.encode(query, last.name)
        )

    @api.get("/{collection}", summary="One collection", responses=documented(bodies.COLLECTION) | read)
    def get_collection(collection: CollectionName, tenant: Reader) -> Response:
        """A collection, with its numbers of documents and passages."""
        with deps.collections() as store:
            return answered(CollectionAnswer.of(store.get(tenant, _known(collection))))

    @api.delete("/{collection}", summary="Delete a collection", responses=documented(bodies.DELETED_COLLECTION) | read)
    def delete_collection(collection: CollectionName, tenant: Writer) -> Response:
        """Delete it with its documents, passages and vectors; ingestions into it end."""
        with deps.collections() as store:
            gone = store.delete(tenant, _known(collection))
        return answered(DeletedCollection(name=gone.name, documents=gone.documents, passages=gone.passages))


def _add_documents(api: APIRouter, deps: DocumentDeps) -> None:
    read = errors((*READ_STATUSES, 400), ERRORS, is_native=True)
    Reader = Annotated[str, deps.caller(Permission.DOCUMENTS_READ)]  # noqa: N806 - a type
    Writer = Annotated[str, deps.caller(Permission.DOCUMENTS_WRITE)]  # noqa: N806 - a type
    uploader = deps.permitted(Permission.DOCUMENTS_WRITE)

    @api.post(
        "/{collection}/documents",
        status_code=202,
        summary="Upload a document",
        responses=documented(bodies.PENDING, "It was accepted, and will be ingested", 202)
        | errors((*READ_STATUSES, 400, 408, 411, 413, 415), ERRORS, is_native=True),
        openapi_extra=_upload_body(),
    )
    async def upload_document(
        request: Request,
        collection: CollectionName,
        identity: Annotated[Identity, Depends(uploader)],
        name: Name = None,
    ) -> Response:
        """Upload a PDF, HTML, Markdown or plain text. A document of the same name is replaced once it is ingested."""
        made = await uploaded(deps, request, identity.tenant, _known(collection), name)
        answer = answered(DocumentAnswer.of(made), 202)
        answer.headers["location"] = f"/v1/collections/{collection}/documents/{made.document_id}"
        return answer

    @api.get(
        "/{collection}/documents", summary="The documents", responses=documented(bodies.DOCUMENTS, "A page") | read
    )
    def list_documents(
        collection: CollectionName, tenant: Reader, limit: Limit = 20, cursor: Cursor = None
    ) -> Response:
        """Documents by name, with their status; never their content."""
        query = (tenant, "documents", _known(collection))
        behind = _cursors.decode(query, cursor) or ""
        with deps.documents(tenant) as store:
            found = store.page(collection, behind, limit + 1)
        return page_of(*(DocumentPage, found, limit, DocumentAnswer.of), lambda last: _cursors.encode(query, last.name))

    @api.get("/{collection}/documents/{document_id}", summary="One document", responses=documented(bodies.DONE) | read)
    def get_document(collection: CollectionName, document_id: DocumentId, tenant: Reader) -> Response:
        """Status of a document: `pending`, `running`, `done`, or `failed` with the reason."""
        with deps.documents(tenant) as store:
            found = store.document(_known(collection), _known_document(document_id))
        if found is None:
            raise unknown_document()
        return answered(DocumentAnswer.of(found))

    @api.delete(
        "/{collection}/documents/{document_id}",
        summary="Delete a document",
        responses=documented(bodies.DELETED_DOCUMENT) | read,
    )
    def delete_document(collection: CollectionName, document_id: DocumentId, tenant: Writer) -> Response:
        """Delete it with its passages and vectors; an ingestion that is under way stores nothing any more."""
        with deps.documents(tenant) as store:
            if not store.remove(_known(collection), _known_document(document_id)):
                raise unknown_document()
        return answered(DeletedDocument(id=document_id))


def _created(deps: DocumentDeps, tenant: str, name: str) -> CollectionAnswer:
    if not is_name(name):
        raise invalid("name", "up to 39 of a-z, 0-9 and -, and no - at the beginning")
    with deps.documents(tenant) as documents:
        embedder = documents.embedder()
    if embedder is None:
        message = "no process that ingests documents has started yet"
        raise GatewayError(503, NO_EMBEDDER, message, retry_after_ms=5_000)
    with deps.collections() as store:
        try:
            return CollectionAnswer.of(store.create(tenant, name, *embedder))
        except CollectionExistsError:
            raise GatewayError(409, CONFLICT, "there is a collection of this name", field="name") from None
        except TooManyCollectionsError as error:
            raise GatewayError(429, QUOTA_REACHED, f"{error}: delete one of them", field="name") from None


def _known(collection: str) -> str:
    """The name, if it can be one of a collection. Raises GatewayError: 404."""
    if not is_name(collection):
        raise unknown_collection()
    current().object_id = collection
    return collection


def _known_document(document_id: str) -> str:
    if not is_document_id(document_id):
        raise unknown_document()
    current().object_id = document_id
    return document_id


def _upload_body() -> dict[str, Any]:
    schema = {
        "type": "object",
        "required": ["file"],
        "properties": {
            "file": {"type": "string", "format": "binary", "description": "The document"},
            "name": {"type": "string", "description": "Instead of the file's own name"},
        },
    }
    form = {"summary": "A form", "value": {"file": "# Returns\n\nWithin 30 days.", "name": "guides/returns.md"}}
    content: dict[str, Any] = {"multipart/form-data": {"schema": schema, "examples": {"a_form": form}}}
    for media_type in ("application/octet-stream", "text/plain"):
        content[media_type] = {
            "schema": {"type": "string", "format": "binary", "description": _RAW},
            "example": "Returns are accepted within 30 days.",
        }
    return {"requestBody": {"required": True, "content": content}}
