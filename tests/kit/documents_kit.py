"""The routes of collections and documents on a real database, and the ingest process within the test."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
from fastapi import FastAPI
from starlette.requests import Request
from starlette.testclient import TestClient

from fairlane_server.api_keys.api_key import Role
from fairlane_server.postgres.connection import ALL_TENANTS, act_for, connect
from fairlane_server.processes.service import Readiness, StopSignal
from fairlane_server.retrieval.embedder import FloatArray
from fairlane_server.retrieval.parsers import DocumentLimits
from fairlane_server.retrieval.pgvector_store import PgVectorCollections
from producers.gateway.documents.deps import DocumentDeps
from producers.gateway.documents.routes import router
from producers.gateway.edge.error_responses import install
from producers.gateway.identity.identity import Identity
from producers.gateway.openai.batch_deps import BatchDeps
from producers.ingest.ingester import Ingester, IngestPolicy, SharedEmbedder
from producers.ingest.service import CONDITIONS, IngestService
from producers.ingest.upload_store import DocumentQuota
from producers.ingest.work_store import WorkStore
from tests.kit.stack import PostgresServer
from tests.kit.waiting import eventually

WORDS = ("warranty", "canteen", "ferry", "archive")


class WordEmbedder:
    """A vector by which of WORDS a text has."""

    name = "words:1"
    dimensions = len(WORDS)

    def embed(self, texts: Sequence[str]) -> FloatArray:
        counts = np.array([[float(word in text.lower()) for word in WORDS] for text in texts], dtype=np.float32)
        lengths = np.linalg.norm(counts, axis=1, keepdims=True)
        vectors: FloatArray = (counts / np.where(lengths > 0, lengths, 1.0)).astype(np.float32)
        return vectors

    def close(self) -> None: ...


@dataclass
class DocumentsBench:
    """One database, one folder of files, any number of tenants: a key is the name of its tenant."""

    database: PostgresServer
    folder: Path
    quota: DocumentQuota = field(default_factory=DocumentQuota)
    limits: DocumentLimits = field(
        default_factory=lambda: DocumentLimits(
            max_file_bytes=1_000_000, max_parse_s=20.0, max_parser_bytes=1 << 30, max_passages=5_000
        )
    )
    embedder: Any = field(default_factory=WordEmbedder)
    most_document_bytes: int = 1_000_000

    def app(self) -> FastAPI:
        async def authenticate(request: Request) -> Identity:
            tenant, _, role = request.headers["authorization"].removeprefix("Bearer ").partition(":")
            return Identity(tenant, "key", Role(role) if role else Role.TENANT)

        files = str(self.folder)
        shared = BatchDeps(authenticate, self.database.gateway_dsn, files, lambda: 1)
        deps = DocumentDeps(
            authenticate,
            self.database.gateway_dsn,
            files,
            self.folder / "spool",
            shared.calls,
            shared.transfers,
            self.quota,
            self.most_document_bytes,
        )
        app = FastAPI()
        install(app)
        app.include_router(router(deps))
        return app

    @contextmanager
    def client(self, tenant: str = "acme") -> Iterator[TestClient]:
        with TestClient(self.app(), base_url="http://gateway", headers={"authorization": f"Bearer {tenant}"}) as made:
            yield made

    @contextmanager
    def service(self, lanes: int = 1, lease_s: float = 30.0) -> Iterator[IngestService]:
        """An ingest process, to be stepped by the test."""
        dsn, embedder = self.database.ingest_dsn, SharedEmbedder(self.embedder)
        policy = IngestPolicy(str(self.folder), self.quota.most_passages, self.limits)
        store = WorkStore(dsn)
        store.announce(self.embedder)
        made = [Ingester(WorkStore(dsn), PgVectorCollections(dsn), embedder, policy) for _ in range(lanes)]
        service = IngestService(
            store, made, str(self.folder), StopSignal(), Readiness(*CONDITIONS), lease_s=lease_s, leave_s=60.0
        )
        try:
            yield service
        finally:
            service.stop.stop()
            service.run()

    def ingest_all(self) -> None:
        """Run an ingest process until nothing waits, and its content is deleted."""
        with self.service() as service:

            def is_done() -> bool:
                service.step()
                return not service.store.counted()

            eventually(is_done, timeout_s=120, what="the end of all ingestions")
            service.sweep()

    def rows(self, query: str, *parameters: object, tenant: str = ALL_TENANTS) -> list[tuple[Any, ...]]:
        """As the owner of the tables."""
        with connect(self.database.owner_dsn, "test") as connection:
            act_for(connection, tenant)
            return connection.execute(query.encode(), parameters).fetchall()

    def stored(self) -> set[str]:
        """Names of the stored files, those of incomplete uploads have none."""
        return {path.name for path in self.folder.rglob("*") if path.is_file()}


def collection(client: TestClient, name: str = "handbook") -> str:
    """A new collection."""
    answer = client.post("/v1/collections", json={"name": name})
    assert answer.status_code == 201, answer.text
    return name


def upload(
    client: TestClient,
    content: bytes,
    name: str,
    *,
    of: str = "handbook",
    media_type: str = "application/octet-stream",
    status: int = 202,
) -> Any:
    """Upload the bytes as they are; the answer's body."""
    path = f"/v1/collections/{of}/documents"
    answer: httpx2.Response = client.post(
        path, params={"name": name}, content=content, headers={"content-type": media_type}
    )
    assert answer.status_code == status, answer.text
    return answer.json()


def documents(client: TestClient, of: str = "handbook") -> dict[str, Any]:
    """The first page, by name."""
    answer = client.get(f"/v1/collections/{of}/documents", params={"limit": 100})
    assert answer.status_code == 200, answer.text
    return {one["name"]: one for one in answer.json()["data"]}
