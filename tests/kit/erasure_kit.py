"""The routes of conversations and erasures on a real database and a real Redis, and the log that the recorder reads."""

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import redis
from fastapi import FastAPI
from psycopg import sql
from pydantic import SecretStr
from starlette.requests import Request
from starlette.testclient import TestClient

from fairlane.clock import now_ms
from fairlane.records import ConversationTurn, InferenceReply, Message, Output, SourceCoordinate, Timings
from fairlane.schema_files import default_codec
from fairlane_server.api_keys.api_key import Role
from fairlane_server.erasure.expiry import Lifetimes
from fairlane_server.postgres.connection import ALL_TENANTS, act_for, connect
from fairlane_server.redis.cache import RedisCache
from fairlane_server.redis.client import redis_client
from fairlane_server.topics.families import load_families
from producers.gateway.conversations.deps import ConversationDeps
from producers.gateway.conversations.routes import router
from producers.gateway.edge.error_responses import install
from producers.gateway.identity.identity import Identity
from producers.gateway.openai.batch_deps import BatchDeps
from producers.gateway.results.cache_entries import MOST_ENTRY_BYTES
from producers.gateway.results.request_store import RequestStore
from producers.gateway.results.results import Results
from stream_processors.recorder.positions import Move, Partition, Stored
from stream_processors.recorder.projection import LogRecord, project
from stream_processors.recorder.store import RecorderStore
from tests.kit.stack import PostgresServer

LIVES = Lifetimes(86_400_000, 300_000, 300_000, 60_000, 7_776_000_000, 7_776_000_000)


def reply(
    request_id: str,
    conversation: str | None,
    question: str,
    answer: str,
    at_ms: int,
    tenant: str = "acme",
    replay_of: str | None = None,
) -> InferenceReply:
    """An answered request, as it is in the log."""
    turn = None if conversation is None else ConversationTurn(conversation, (Message("user", question),))
    return InferenceReply(
        request_id,
        tenant,
        "ok",
        output=Output(text=answer),
        source=SourceCoordinate(f"requests.{tenant}", 0, abs(hash(request_id)) % 10_000),
        turn=turn,
        timings=Timings(submitted_at_ms=at_ms),
        replay_of=replay_of,
    )


@dataclass
class ErasureBench:
    """One database, one Redis, any number of tenants: a key is the name of its tenant, with a role behind a colon.

    Attributes:
        log: what the recorder read, in its order.
        most_erased: most names of a tenant's erasures.
        results: of the gateway whose client was used last.
    """

    database: PostgresServer
    redis_url: str
    log: list[InferenceReply] = field(default_factory=list)
    most_erased: int = 1_000
    results: Results | None = None
    deps: ConversationDeps | None = None

    def record(self, replies: Sequence[InferenceReply]) -> None:
        """Append these to the log, and let the recorder read them."""
        self.log += replies
        self._write(replies)

    def read_log_again(self) -> None:
        """From its beginning, as after a loss of the database's positions."""
        self._write(self.log)

    def _write(self, replies: Sequence[InferenceReply]) -> None:
        partition, codec, now = Partition("replies.acme", 0), default_codec(), now_ms()
        with closing(RecorderStore(self.database.recorder_dsn)) as store:
            store.start_at({partition: Stored(0)})
            begin = store.next_offsets([partition])[partition].next_offset
            records = [
                LogRecord(*partition, begin + number, now, None, codec.encode(one))
                for number, one in enumerate(replies)
            ]
            store.write(project(records, codec), {partition: Move(begin, begin + len(records))})

    @contextmanager
    def client(self, tenant: str = "acme") -> Iterator[TestClient]:
        async def authenticate(request: Request) -> Identity:
            name, _, role = request.headers["authorization"].removeprefix("Bearer ").partition(":")
            return Identity(name, "0a1b2c3d4e5f6071", Role(role) if role else Role.TENANT)

        shared = BatchDeps(authenticate, self.database.gateway_dsn, "", lambda: 1)

        @asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[None]:
            client = redis_client(SecretStr(self.redis_url), 5.0)
            cache = RedisCache(client, 300, 5.0, most_entry_bytes=MOST_ENTRY_BYTES)
            results = self.results = Results(cache, RequestStore(self.database.gateway_dsn))
            dsn, families = self.database.gateway_dsn, load_families()
            slots = shared.calls, shared.transfers
            self.deps = ConversationDeps(authenticate, dsn, results, *slots, families, LIVES, self.most_erased)
            app.include_router(router(self.deps))
            await results.open()
            yield
            await results.close()
            if client is not None:
                await client.aclose()

        app = FastAPI(lifespan=lifespan)
        install(app)
        with TestClient(app, base_url="http://gateway", headers={"authorization": f"Bearer {tenant}"}) as made:
            yield made

    def remember(self, replies: Sequence[InferenceReply]) -> None:
        """As a gateway that reads these from its reply topic."""
        assert self.results is not None
        self.results.remember(replies)

    def carry_out(self, client: TestClient, erasure_id: str, tenant: str = "acme") -> None:
        """Go on with an erasure, as a gateway does that finds it left."""
        assert self.deps is not None
        assert client.portal is not None
        client.portal.call(self.deps.carry_out, tenant, erasure_id)

    def found(self, word: str) -> list[str]:
        """Where a word is in Postgres, in every column of every table, and in Redis, in names and values."""
        places = [f"redis:{name}" for name in self._in_redis(word)]
        with connect(self.database.owner_dsn, "test") as connection:
            act_for(connection, ALL_TENANTS)
            tables = connection.execute(
                "SELECT relname FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relkind = 'r'"
            ).fetchall()
            for (table,) in tables:
                query = sql.SQL("SELECT count(*) FROM {} AS t WHERE t::text LIKE %s").format(sql.Identifier(table))
                row = connection.execute(query, (f"%{word}%",)).fetchone()
                if row is not None and row[0]:
                    places.append(f"postgres:{table}")
        return sorted(places)

    def _in_redis(self, word: str) -> list[str]:
        with closing(redis.Redis.from_url(self.redis_url)) as client:
            names: list[Any] = list(client.scan_iter())
            return [
                name.decode(errors="replace")
                for name in names
                if word.encode() in name
                or (client.type(name) == b"string" and word.encode() in (client.get(name) or b""))
            ]

    def rows(self, query: str, *parameters: object) -> list[tuple[Any, ...]]:
        """As the owner of the tables, for all tenants."""
        with connect(self.database.owner_dsn, "test") as connection:
            act_for(connection, ALL_TENANTS)
            return connection.execute(query.encode(), parameters).fetchall()
