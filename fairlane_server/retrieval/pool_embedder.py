"""Embedder that runs on a pool of Fairlane's own, as work of one tenant."""

import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from fairlane.backoff import Backoff
from fairlane.client.aio import AsyncClient
from fairlane.client.handle import AsyncHandle, Handle
from fairlane.client.sync import Client
from fairlane.errors import Expired, Failed, FairlaneError, Rejected
from fairlane.outcomes import Code, Priority, Task
from fairlane.records import InferenceReply
from fairlane_server.retrieval.embedder import (
    EmbedderError,
    FloatArray,
    TextRefusedError,
    batches,
    embed_texts,
    unit_vectors,
)
from fairlane_server.text import clean_text

MOST_TEXTS = 32
MOST_CHARACTERS = 200_000
"""Of one request."""

_UNDER_WAY = 16
_ATTEMPTS = 8
_BACKOFF = Backoff(first_s=1.0, longest_s=60.0)
# The same texts would be refused again.
_REFUSALS = (Code.CONTEXT_TOO_LONG, Code.POISON, Code.INVALID)
_BULK_TIMEOUT_MS = 600_000
_QUERY_TIMEOUT_MS = 2_000
# What the service may take to say that the time is over.
_GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class PoolModel:
    """The model, by its name in models.yaml. Another version of it needs another name, or new collections."""

    model: str
    dimensions: int

    @property
    def name(self) -> str:
        return f"pool:{self.model}"

    def vectors(self, reply: InferenceReply, count: int) -> FloatArray:
        """The vectors of a reply. Raises EmbedderError for an invalid one."""
        if reply.output is None or reply.output.embeddings is None:
            raise EmbedderError(f"the reply {reply.request_id} has no vectors")
        return unit_vectors(reply.output.embeddings, count, self.dimensions)


class PoolEmbedder:
    """Sends requests of low priority, several at a time. What the service refuses for the moment is sent again when it
    says so, a few times."""

    def __init__(self, client: Client, model: PoolModel, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self._client = client
        self._model = model
        self._sleep = sleep
        self.name, self.dimensions = model.name, model.dimensions

    def embed(self, texts: Sequence[str]) -> FloatArray:
        """See Embedder. A text longer than the model's context is an error, which names it by its place."""
        return embed_texts([clean_text(text) for text in texts], self.dimensions, self._embed)

    def close(self) -> None:
        self._client.close()

    def _embed(self, texts: list[str]) -> FloatArray:
        parts: list[FloatArray] = []
        under_way: deque[tuple[list[str], Handle]] = deque()
        try:
            for batch in batches(texts, MOST_TEXTS, MOST_CHARACTERS):
                under_way.append((batch, self._submit(batch)))
                if len(under_way) == _UNDER_WAY:
                    parts.append(self._finish(*under_way.popleft()))
            while under_way:
                parts.append(self._finish(*under_way.popleft()))
        except FairlaneError as error:
            refused = isinstance(error, Rejected | Failed) and error.code in _REFUSALS
            raise (TextRefusedError if refused else EmbedderError)(f"the pool did not embed: {error}") from error
        finally:
            for _, handle in under_way:
                with suppress(FairlaneError):
                    handle.cancel()
        return np.concatenate(parts)

    def _submit(self, batch: list[str]) -> Handle:
        try:
            return self._client.submit(
                model=self._model.model,
                task=Task.EMBED,
                texts=batch,
                priority=Priority.LOW,
                timeout_ms=_BULK_TIMEOUT_MS,
            )
        except ValueError as error:
            raise EmbedderError(f"the pool cannot be asked: {error}") from error

    def _finish(self, batch: list[str], handle: Handle) -> FloatArray:
        failures = 0
        while True:
            try:
                reply = handle.result(_BULK_TIMEOUT_MS / 1_000 + _GRACE_S)
            except (Rejected, Expired, Failed) as error:
                failures += 1
                wait_s = _retry_after_s(error, failures)
                if wait_s is None or failures == _ATTEMPTS:
                    raise
                self._sleep(wait_s)
                handle = self._submit(batch)
            else:
                return self._model.vectors(reply, len(batch))


class PoolQueryEmbedder:
    """Sends a request of high priority for each query, once."""

    def __init__(self, client: AsyncClient, model: PoolModel, *, timeout_ms: int = _QUERY_TIMEOUT_MS) -> None:
        self._client = client
        self._model = model
        self._timeout_ms = timeout_ms
        self.name, self.dimensions = model.name, model.dimensions

    async def embed_query(self, text: str) -> FloatArray:
        """See QueryEmbedder. A query that nobody waits for any more is cancelled."""
        if not text.strip():
            return np.zeros(self.dimensions, dtype=np.float32)
        try:
            handle = await self._client.submit(
                model=self._model.model,
                task=Task.EMBED,
                texts=[clean_text(text)],
                priority=Priority.HIGH,
                timeout_ms=self._timeout_ms,
            )
            reply = await self._wait(handle)
        except (FairlaneError, ValueError) as error:
            raise EmbedderError(f"the pool did not embed: {error}") from error
        vector: FloatArray = self._model.vectors(reply, 1)[0]
        return vector

    async def aclose(self) -> None:
        await self._client.close()

    async def _wait(self, handle: AsyncHandle) -> InferenceReply:
        try:
            return await handle.result(self._timeout_ms / 1_000 + _GRACE_S)
        finally:
            if not handle.done():
                with suppress(FairlaneError):
                    handle.cancel()


def _retry_after_s(error: Rejected | Expired | Failed, failures: int) -> float | None:
    """When to send it again; None where that would change nothing."""
    wait_s = _BACKOFF.delay_s(failures, random.random())  # noqa: S311 - spreads retries, guards nothing
    if isinstance(error, Rejected):
        if error.retry_after_ms is None:
            return None
        return min(_BACKOFF.longest_s, max(wait_s, error.retry_after_ms / 1_000))
    if isinstance(error, Failed):
        return wait_s if error.code == Code.RETRIES_EXHAUSTED else None
    return wait_s
