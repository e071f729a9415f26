"""Embedding by a server that misbehaves: an error each, soon, and never with the key or a text in it."""

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from deploy.models.prepare import prepare, recipes
from fairlane_server.retrieval.embedder import EmbedderError, TextRefusedError
from fairlane_server.retrieval.openai_embedder import (
    MOST_CHARACTERS,
    MOST_TEXTS,
    OpenAiEmbedder,
    OpenAiQueryEmbedder,
    OpenAiServer,
)
from fairlane_server.retrieval.static_embedder import StaticEmbedder
from tests.kit.embedding_server import KEY, Answer, EmbeddingServer, embedding_server
from tests.kit.encoder_kit import MODELS_DIR

pytestmark = [pytest.mark.full, pytest.mark.model]

SECRET = "a text that nobody may see"
ATTEMPTS = 5


@pytest.fixture(scope="module")
def static() -> StaticEmbedder:
    prepare(MODELS_DIR, recipes(), print)
    return StaticEmbedder(MODELS_DIR / "all-minilm-l6-v2-static")


@pytest.fixture
def server(static: StaticEmbedder) -> Iterator[EmbeddingServer]:
    with embedding_server(static) as running:
        yield running


@pytest.fixture
def sleeps() -> list[float]:
    return []


def described(server: EmbeddingServer) -> OpenAiServer:
    return OpenAiServer(server.url, "static", server.static.dimensions, KEY)


@pytest.fixture
def bulk(server: EmbeddingServer, sleeps: list[float]) -> Iterator[OpenAiEmbedder]:
    embedder = OpenAiEmbedder(described(server), timeout_s=1.0, sleep=sleeps.append)
    yield embedder
    embedder.close()


def ask(server: EmbeddingServer, text: str = SECRET) -> Any:
    async def once() -> Any:
        embedder = OpenAiQueryEmbedder(described(server), timeout_s=1.0)
        try:
            return await embedder.embed_query(text)
        finally:
            await embedder.aclose()

    return asyncio.run(once())


def body_of(server: EmbeddingServer, data: Any, **more: Any) -> bytes:
    """An answer with these ``data``; what an entry of them says replaces what a good one says."""
    answer = server.vectors([SECRET])
    [good] = answer["data"]
    if isinstance(data, list):
        data = [{**good, **entry} if isinstance(entry, dict) else entry for entry in data]
    return json.dumps({**answer, "data": data, **more}).encode()


def test_the_model_the_texts_and_the_key_are_sent_in_batches(
    server: EmbeddingServer, bulk: OpenAiEmbedder, static: StaticEmbedder
) -> None:
    texts = [f"text {number}" for number in range(300)]
    assert bulk.embed(texts) == pytest.approx(static.embed(texts), abs=1e-5)
    assert [len(request["input"]) for request in server.requests] == [MOST_TEXTS, MOST_TEXTS, 300 - 2 * MOST_TEXTS]
    assert {request["model"] for request in server.requests} == {"static"}
    assert set(server.keys) == {f"Bearer {KEY}"}
    server.requests.clear()
    bulk.embed(["a" * (MOST_CHARACTERS + 1), "b", "c"])
    assert [len(request["input"]) for request in server.requests] == [1, 2]
    assert len(server.requests[0]["input"][0]) == MOST_CHARACTERS
    assert KEY not in repr(described(server))


def test_without_a_key_none_is_sent(server: EmbeddingServer) -> None:
    embedder = OpenAiEmbedder(replace(described(server), key=None))
    embedder.embed(["text"])
    embedder.close()
    assert server.keys == [None]


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_refusal_for_the_moment_is_tried_again_after_a_while(
    server: EmbeddingServer, bulk: OpenAiEmbedder, sleeps: list[float], status: int
) -> None:
    server.answers = [Answer(status), Answer(status, headers={"Retry-After": "7"})]
    server.answers.append(Answer(status, headers={"Retry-After": "86400"}))
    assert np.linalg.norm(bulk.embed([SECRET])) == pytest.approx(1.0, abs=1e-5)
    assert 0 < sleeps[0] <= 0.5
    assert sleeps[1:] == [7.0, 30.0]


def test_it_gives_up_in_the_end(server: EmbeddingServer, bulk: OpenAiEmbedder, sleeps: list[float]) -> None:
    server.answers = [Answer(429, SECRET.encode(), {"Retry-After": "soon"})] * 9
    with pytest.raises(EmbedderError, match=f"^the embedder answered 429, {ATTEMPTS} times$"):
        bulk.embed([SECRET])
    assert (len(server.requests), len(sleeps)) == (ATTEMPTS, ATTEMPTS - 1)


@pytest.mark.parametrize(("status", "is_refused"), [(400, True), (413, True), (422, True), (401, False), (404, False)])
def test_a_text_that_is_refused_is_told_apart(
    server: EmbeddingServer, bulk: OpenAiEmbedder, status: int, is_refused: bool
) -> None:
    server.answers = [Answer(status)]
    with pytest.raises(EmbedderError) as caught:
        bulk.embed(["text"])
    assert isinstance(caught.value, TextRefusedError) == is_refused


def test_a_query_is_asked_once(server: EmbeddingServer) -> None:
    server.answers = [Answer(503)]
    with pytest.raises(EmbedderError, match=r"^the embedder answered 503$"):
        ask(server)
    assert len(server.requests) == 1


@pytest.mark.parametrize("status", [400, 401, 404, 302, 204])
def test_another_refusal_is_final_and_shows_nothing_of_its_text(
    server: EmbeddingServer, bulk: OpenAiEmbedder, sleeps: list[float], status: int
) -> None:
    refusal = Answer(status, b"" if status == 204 else f"{SECRET} {KEY}".encode(), {"Location": server.url})
    server.answers = [refusal, refusal]
    for embed in (lambda: bulk.embed([SECRET]), lambda: ask(server)):
        with pytest.raises(EmbedderError, match=f"^the embedder answered {status}$"):
            embed()
    assert (len(server.requests), sleeps) == (2, [])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "one vector for each of 1 texts"),
        ([{}, {}], "one vector for each of 1 texts"),
        ([{"index": 1}], "one vector for each of 1 texts"),
        ([{"index": "0"}], "is not what /v1/embeddings answers"),
        ([{"index": True}], "is not what /v1/embeddings answers"),
        ([SECRET], "is not what /v1/embeddings answers"),
        (None, "is not what /v1/embeddings answers"),
        ([{"embedding": [1.0]}], r"shape \(1, 1\) instead of"),
        ([{"embedding": SECRET}], "something else than numbers"),
        ([{"embedding": [[1.0]] * 256}], r"shape \(1, 256, 1\)"),
        ([{"embedding": [float("nan")] * 256}], "not finite"),
        ([{"embedding": [float("inf")] * 256}], "not finite"),
        ([{"embedding": [10**400, *[0.0] * 255]}], "else than numbers"),
        ([{"embedding": [None] * 256}], "not finite"),
    ],
)
def test_an_answer_that_is_none_is_an_error(
    server: EmbeddingServer, bulk: OpenAiEmbedder, sleeps: list[float], data: Any, message: str
) -> None:
    server.answers = [Answer(body=body_of(server, data))] * 2
    for embed in (lambda: bulk.embed([SECRET]), lambda: ask(server)):
        with pytest.raises(EmbedderError, match=message) as caught:
            embed()
        assert SECRET not in str(caught.value)
    assert sleeps == []


def test_an_answer_that_is_too_long_is_not_read_to_its_end(server: EmbeddingServer, bulk: OpenAiEmbedder) -> None:
    server.answers = [Answer(body=body_of(server, [{}], more="x" * 200_000))]
    with pytest.raises(EmbedderError, match="is longer than 76032 bytes"):
        bulk.embed([SECRET])


@pytest.mark.parametrize("body", [b"", b"\xff", b"{", b"[" * 50_000, b"<html>nothing here</html>"])
def test_what_is_no_json_is_an_error(server: EmbeddingServer, bulk: OpenAiEmbedder, body: bytes) -> None:
    server.answers = [Answer(body=body)]
    with pytest.raises(EmbedderError, match="is not what /v1/embeddings answers"):
        bulk.embed([SECRET])


def test_a_compressed_answer_is_refused_before_it_is_unpacked(server: EmbeddingServer, bulk: OpenAiEmbedder) -> None:
    server.answers = [Answer(body=b"\x1f\x8b", headers={"Content-Encoding": "gzip"})]
    with pytest.raises(EmbedderError, match="the embedder's answer is compressed"):
        bulk.embed([SECRET])


def test_vectors_of_any_length_are_made_unit_length(server: EmbeddingServer, bulk: OpenAiEmbedder) -> None:
    expected = server.static.embed([SECRET])
    for factor in (1e-300, 1e-3, 1e300):
        scaled = [value * factor for value in expected[0].tolist()]
        server.answers = [Answer(body=body_of(server, [{"embedding": scaled}]))]
        assert bulk.embed([SECRET]) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("slow", [Answer(body=None), Answer(drips=True)], ids=["silent", "dripping"])
def test_a_server_that_is_slow_holds_nobody_for_long(
    server: EmbeddingServer, sleeps: list[float], slow: Answer
) -> None:
    server.answers = [slow] * 9
    embedder = OpenAiEmbedder(described(server), timeout_s=0.2, sleep=sleeps.append)
    started = time.monotonic()
    with pytest.raises(EmbedderError, match=f", {ATTEMPTS} times$"):
        embedder.embed([SECRET])
    embedder.close()
    with pytest.raises(EmbedderError, match=r"did not answer within 1 s|cannot be reached: ReadTimeout"):
        ask(server)
    assert time.monotonic() - started < 30


def test_no_server_is_an_error_that_does_not_show_the_url(sleeps: list[float]) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"http://user:{KEY}@127.0.0.1:{nobody.getsockname()[1]}/v1"
        embedder = OpenAiEmbedder(OpenAiServer(url, "static", 4, KEY), sleep=sleeps.append)
        with pytest.raises(EmbedderError, match=f"cannot be reached: ConnectError, {ATTEMPTS} times") as caught:
            embedder.embed([SECRET])
        embedder.close()
    assert KEY not in str(caught.value)
    assert len(sleeps) == ATTEMPTS - 1


def test_after_it_was_closed_it_embeds_nothing(server: EmbeddingServer, bulk: OpenAiEmbedder) -> None:
    bulk.close()
    with pytest.raises(EmbedderError, match="cannot be reached: RuntimeError"):
        bulk.embed([SECRET])
