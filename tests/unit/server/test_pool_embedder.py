"""Embedding through a pool: what is sent again, what is not, and what is told of it."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest

from fairlane.client import AsyncClient, Client
from fairlane.errors import Backpressure, FairlaneError, Unavailable, unsuccessful_error
from fairlane.records import InferenceReply, Output
from fairlane_server.retrieval.embedder import EmbedderError, TextRefusedError
from fairlane_server.retrieval.pool_embedder import MOST_TEXTS, PoolEmbedder, PoolModel, PoolQueryEmbedder

MODEL = PoolModel("encoder", 2)
ATTEMPTS = 8


def ok(texts: Sequence[str]) -> InferenceReply:
    return InferenceReply(
        "id", "acme", "ok", output=Output(embeddings=tuple((float(len(text)), 1.0) for text in texts))
    )


def refused(code: str, retry_after_ms: int | None = None, outcome: str = "rejected") -> InferenceReply:
    return InferenceReply("id", "acme", outcome, code, retry_after_ms=retry_after_ms)


@dataclass
class FakeHandle:
    """Of both clients: ``outcome`` is a reply, an error, or None for one that never comes."""

    outcome: InferenceReply | FairlaneError | None
    cancelled: bool = False

    def result(self, timeout: float | None = None) -> InferenceReply:
        assert timeout is not None
        assert self.outcome is not None
        if isinstance(self.outcome, FairlaneError):
            raise self.outcome
        if (error := unsuccessful_error(self.outcome)) is not None:
            raise error
        return self.outcome

    def done(self) -> bool:
        return self.outcome is not None

    def cancel(self) -> None:
        self.cancelled = True


class FakeAsyncHandle(FakeHandle):
    async def result(self, timeout: float | None = None) -> InferenceReply:  # type: ignore[override] # as AsyncHandle
        if self.outcome is None:
            await asyncio.sleep(3_600)
        return super().result(timeout)


@dataclass
class FakeClient:
    """``outcomes`` are those of the next requests; then all are answered."""

    outcomes: list[Any] = field(default_factory=list)
    sent: list[dict[str, Any]] = field(default_factory=list)
    handles: list[FakeHandle] = field(default_factory=list)

    def submit(self, **fields: Any) -> FakeHandle:
        self.sent.append(fields)
        outcome = self.outcomes.pop(0) if self.outcomes else ok(fields["texts"])
        if isinstance(outcome, ValueError | Backpressure):
            raise outcome
        handle = FakeHandle(outcome)
        self.handles.append(handle)
        return handle

    def close(self) -> None:
        pass


class FakeAsyncClient(FakeClient):
    async def submit(self, **fields: Any) -> FakeAsyncHandle:  # type: ignore[override] # as AsyncClient
        handle = FakeAsyncHandle(super().submit(**fields).outcome)
        self.handles[-1] = handle
        return handle


def embedder_of(client: FakeClient, sleep: Callable[[float], None] = lambda _: None) -> PoolEmbedder:
    return PoolEmbedder(cast(Client, client), MODEL, sleep=sleep)


def test_texts_go_in_batches_of_low_priority_and_come_back_in_order() -> None:
    client = FakeClient()
    texts = ["x" * (number + 1) for number in range(MOST_TEXTS * 20 + 1)]
    vectors = embedder_of(client).embed(texts)
    assert [len(sent["texts"]) for sent in client.sent] == [MOST_TEXTS] * 20 + [1]
    assert {(sent["model"], sent["task"], sent["priority"]) for sent in client.sent} == {("encoder", "embed", "low")}
    assert all(sent["timeout_ms"] > 0 for sent in client.sent)
    assert vectors[:, 0] / vectors[:, 1] == pytest.approx(np.arange(1, len(texts) + 1))


def test_what_is_refused_for_the_moment_is_sent_again_when_the_service_says_so() -> None:
    sleeps: list[float] = []
    outcomes = [
        refused("overloaded", 20_000),
        refused("quota_exceeded", 86_400_000),
        refused("", outcome="expired"),
        refused("retries_exhausted", outcome="failed"),
    ]
    client = FakeClient(outcomes)
    assert embedder_of(client, sleeps.append).embed(["text"]).shape == (1, 2)
    assert sleeps[:2] == [20.0, 60.0]
    assert all(0 < wait_s <= 60 for wait_s in sleeps)
    assert [sent["texts"] for sent in client.sent] == [["text"]] * 5


def test_it_gives_up_in_the_end_and_takes_back_what_is_under_way() -> None:
    sleeps: list[float] = []
    client = FakeClient([refused("overloaded", 1), ok(["b"] * MOST_TEXTS), *[refused("overloaded", 1)] * 20])
    with pytest.raises(EmbedderError, match="the pool did not embed: request id: rejected"):
        embedder_of(client, sleeps.append).embed(["b"] * 2 * MOST_TEXTS)
    assert len(sleeps) == ATTEMPTS - 1
    assert client.handles[1].cancelled


@pytest.mark.parametrize(
    ("outcome", "message"),
    [
        (refused("invalid"), r"rejected \(invalid\)"),
        (refused("context_too_long", outcome="failed"), r"failed \(context_too_long\)"),
        (refused("", outcome="cancelled"), "cancelled"),
        (Unavailable("no broker answers"), "no broker answers"),
        (Backpressure("too much is under way"), "too much is under way"),
        (ValueError("input: too large"), "the pool cannot be asked: input: too large|did not embed: input: too large"),
        (ok(["a", "b"]), r"\(2, 2\) instead of \(1, 2\)"),
        (InferenceReply("id", "acme", "ok"), "the reply id has no vectors"),
        (InferenceReply("id", "acme", "ok", output=Output(embeddings=((float("nan"), 1.0),))), "not finite"),
    ],
)
def test_anything_else_is_an_error_at_once(outcome: Any, message: str) -> None:
    client = FakeClient([outcome])
    with pytest.raises(EmbedderError, match=message):
        embedder_of(client).embed(["text"])
    queries = FakeAsyncClient([outcome])
    with pytest.raises(EmbedderError, match=message):
        asyncio.run(PoolQueryEmbedder(cast(AsyncClient, queries), MODEL).embed_query("text"))
    assert (len(client.sent), len(queries.sent)) == (1, 1)


@pytest.mark.parametrize(
    ("outcome", "is_refused"),
    [
        (refused("context_too_long", outcome="failed"), True),
        (refused("poison", outcome="failed"), True),
        (refused("invalid"), True),
        (refused("engine_error", outcome="failed"), False),
        (refused("unknown_model"), False),
    ],
)
def test_a_text_that_is_refused_is_told_apart(outcome: Any, is_refused: bool) -> None:
    with pytest.raises(EmbedderError) as caught:
        embedder_of(FakeClient([outcome])).embed(["text"])
    assert isinstance(caught.value, TextRefusedError) == is_refused


def test_a_query_is_of_high_priority_and_is_sent_once() -> None:
    client = FakeAsyncClient([refused("overloaded", 1)])
    embedder = PoolQueryEmbedder(cast(AsyncClient, client), MODEL, timeout_ms=700)
    with pytest.raises(EmbedderError, match="overloaded"):
        asyncio.run(embedder.embed_query("text"))
    [sent] = client.sent
    assert (sent["priority"], sent["timeout_ms"], sent["texts"]) == ("high", 700, ["text"])


def test_a_query_that_nobody_waits_for_is_cancelled() -> None:
    client = FakeAsyncClient([None])
    embedder = PoolQueryEmbedder(cast(AsyncClient, client), MODEL)

    async def ask() -> None:
        async with asyncio.timeout(0.05):
            await embedder.embed_query("text")

    with pytest.raises(TimeoutError):
        asyncio.run(ask())
    assert client.handles[0].cancelled
