"""Embedder over OpenAI's ``POST /v1/embeddings``."""

import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np

from fairlane.backoff import Backoff
from fairlane_server.retrieval.embedder import (
    EmbedderError,
    FloatArray,
    TextRefusedError,
    batches,
    embed_texts,
    unit_vectors,
)
from fairlane_server.text import clean_text

MOST_TEXTS = 128
MOST_CHARACTERS = 200_000
"""Of one batch, and of the part of a text that is sent."""

_ATTEMPTS = 5
_BACKOFF = Backoff(first_s=0.5, longest_s=10.0)
_LONGEST_RETRY_AFTER_S = 30.0
_TIMEOUT_S = 60.0
_QUERY_TIMEOUT_S = 5.0
_CONNECT_TIMEOUT_S = 5.0
_REFUSALS = (httpx.codes.BAD_REQUEST, httpx.codes.REQUEST_ENTITY_TOO_LARGE, httpx.codes.UNPROCESSABLE_ENTITY)
# A number in JSON, with its sign, its exponent, a comma and some white space.
_MOST_BYTES_OF_A_NUMBER = 40
_BYTES_AROUND_THE_NUMBERS = 65_536


@dataclass(frozen=True, slots=True)
class OpenAiServer:
    """One model of one server. ``url`` is what ``/embeddings`` comes behind, with the ``/v1``.

    Raises EmbedderError for a URL that is none. ``key`` is shown by nothing.
    """

    url: str
    model: str
    dimensions: int
    key: str | None = None

    def __post_init__(self) -> None:
        try:
            parsed = httpx.URL(self.url)
        except httpx.InvalidURL:
            raise EmbedderError("the URL of the embedder is none") from None
        if parsed.scheme not in {"http", "https"} or not parsed.host:
            raise EmbedderError("the URL of the embedder must begin with http:// or https:// and name a host")

    def __repr__(self) -> str:
        return f"<OpenAiServer {self.name}>"

    @property
    def name(self) -> str:
        return f"openai:{self.model}"

    def call(self, texts: Sequence[str]) -> dict[str, Any]:
        """Arguments of a client's ``stream``."""
        headers = {"Accept-Encoding": "identity"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        given = [clean_text(text[:MOST_CHARACTERS]) for text in texts]
        body = {"model": self.model, "input": given, "encoding_format": "float"}
        return {"method": "POST", "url": f"{self.url.rstrip('/')}/embeddings", "json": body, "headers": headers}

    def most_bytes(self, texts: int) -> int:
        return _BYTES_AROUND_THE_NUMBERS + texts * (self.dimensions * _MOST_BYTES_OF_A_NUMBER + 256)


class OpenAiEmbedder:
    """Sends batches, one at a time. Refusals for the moment (429, 5xx, no answer) are tried again, a few times."""

    def __init__(
        self, server: OpenAiServer, *, timeout_s: float = _TIMEOUT_S, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        """``timeout_s`` bounds each attempt as a whole."""
        self._server = server
        self._timeout_s = timeout_s
        self._sleep = sleep
        self._client = httpx.Client(timeout=_timeout(timeout_s))
        self.name = server.name
        self.dimensions = server.dimensions

    def embed(self, texts: Sequence[str]) -> FloatArray:
        return embed_texts(
            texts,
            self.dimensions,
            lambda filled: np.concatenate([*map(self._batch, batches(filled, MOST_TEXTS, MOST_CHARACTERS))]),
        )

    def close(self) -> None:
        self._client.close()

    def _batch(self, texts: list[str]) -> FloatArray:
        failures = 0
        while True:
            try:
                return self._attempt(texts)
            except _LaterError as error:
                failures += 1
                if failures == _ATTEMPTS:
                    raise EmbedderError(f"{error}, {failures} times") from error
                wait_s = _BACKOFF.delay_s(failures, random.random())  # noqa: S311 - spreads retries, guards nothing
                self._sleep(max(wait_s, min(error.retry_after_s, _LONGEST_RETRY_AFTER_S)))

    def _attempt(self, texts: list[str]) -> FloatArray:
        deadline = time.monotonic() + self._timeout_s
        answer = _Answer(self._server.most_bytes(len(texts)))
        try:
            with self._client.stream(**self._server.call(texts)) as response:
                answer.check(response)
                for part in response.iter_raw():
                    if time.monotonic() > deadline:
                        raise _LaterError(f"the embedder did not answer within {self._timeout_s:g} s")
                    answer.add(part)
        except httpx.TransportError as error:
            raise _LaterError(_unreached(error)) from error
        except (httpx.HTTPError, RuntimeError) as error:
            # A RuntimeError is httpx's word for a client that was closed.
            raise EmbedderError(_unreached(error)) from error
        return answer.vectors(len(texts), self.dimensions)


class OpenAiQueryEmbedder:
    """Query embedder without retries: a query's time budget allows one attempt."""

    def __init__(self, server: OpenAiServer, *, timeout_s: float = _QUERY_TIMEOUT_S) -> None:
        self._server = server
        self._timeout_s = timeout_s
        self._client = httpx.AsyncClient(timeout=_timeout(timeout_s))
        self.name = server.name
        self.dimensions = server.dimensions

    async def embed_query(self, text: str) -> FloatArray:
        if not text.strip():
            return np.zeros(self.dimensions, dtype=np.float32)
        answer = _Answer(self._server.most_bytes(1))
        try:
            async with asyncio.timeout(self._timeout_s), self._client.stream(**self._server.call([text])) as response:
                answer.check(response)
                async for part in response.aiter_raw():
                    answer.add(part)
        except TimeoutError as error:
            raise EmbedderError(f"the embedder did not answer within {self._timeout_s:g} s") from error
        except (httpx.HTTPError, RuntimeError) as error:
            raise EmbedderError(_unreached(error)) from error
        vector: FloatArray = answer.vectors(1, self.dimensions)[0]
        return vector

    async def aclose(self) -> None:
        await self._client.aclose()


class _LaterError(EmbedderError):
    """It may go better the next time."""

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class _Answer:
    """The body of an answer as it comes in. Nothing of it is shown in an error: it may repeat the texts."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._body = bytearray()

    def check(self, response: httpx.Response) -> None:
        status = response.status_code
        if status == httpx.codes.TOO_MANY_REQUESTS or status >= httpx.codes.INTERNAL_SERVER_ERROR:
            raise _LaterError(f"the embedder answered {status}", _retry_after_s(response))
        if status in _REFUSALS:
            raise TextRefusedError(f"the embedder answered {status}")
        if status != httpx.codes.OK:
            raise EmbedderError(f"the embedder answered {status}")
        if response.headers.get("Content-Encoding", "identity") != "identity":
            # It was asked for none, and a small answer could unpack to anything.
            raise EmbedderError("the embedder's answer is compressed")

    def add(self, part: bytes) -> None:
        if len(self._body) + len(part) > self._most_bytes:
            raise EmbedderError(f"the embedder's answer is longer than {self._most_bytes} bytes")
        self._body += part

    def vectors(self, count: int, dimensions: int) -> FloatArray:
        try:
            entries = json.loads(self._body)["data"]
            if sorted(_index(entry) for entry in entries) != list(range(count)):
                raise EmbedderError(f"the embedder's answer does not have one vector for each of {count} texts")
            rows = [entry["embedding"] for entry in sorted(entries, key=_index)]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise EmbedderError("the embedder's answer is not what /v1/embeddings answers") from error
        return unit_vectors(rows, count, dimensions)


def _index(entry: dict[str, Any]) -> int:
    index = entry["index"]
    if type(index) is not int:
        raise TypeError("an index that is no number")
    return index


def _retry_after_s(response: httpx.Response) -> float:
    """Of the header, in seconds; dates are not looked at."""
    stated = response.headers.get("Retry-After", "")
    return float(stated) if stated.isascii() and stated.isdigit() else 0.0


def _unreached(error: Exception) -> str:
    # Not the error's own text: it may quote the URL, which may hold a password.
    return f"the embedder cannot be reached: {type(error).__name__}"


def _timeout(timeout_s: float) -> httpx.Timeout:
    return httpx.Timeout(timeout_s, connect=min(timeout_s, _CONNECT_TIMEOUT_S))
