"""One suite over every embedder: the static one, an OpenAI-compatible server, and a pool of Fairlane's own."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deploy.local.services import Service
from deploy.models.prepare import prepare, recipes
from fairlane.outcomes import Task
from fairlane.records import ModelVersion
from fairlane.settings import Settings
from fairlane_server.retrieval.embedder import Embedder, EmbedderError, FloatArray, QueryEmbedder
from fairlane_server.retrieval.embedders import embedder_for, query_embedder_for
from fairlane_server.retrieval.static_embedder import StaticEmbedder
from tests.kit.embedding_server import KEY, embedding_server
from tests.kit.encoder_kit import MODELS_DIR
from tests.kit.pipeline import Pipeline, unique_name

pytestmark = [pytest.mark.full, pytest.mark.model, pytest.mark.timeout(2 * 300)]

START_S = 300.0
TEXTS = ("A man is playing the guitar.", "Someone plays a musical instrument.", "Interest rates rose again.")


@dataclass
class Embedders:
    """Both of one deployment, and the loop that the second lives in."""

    bulk: Embedder
    queries: QueryEmbedder
    loop: asyncio.Runner

    def query(self, text: str) -> FloatArray:
        return self.loop.run(self.queries.embed_query(text))


@pytest.fixture(scope="module")
def static() -> StaticEmbedder:
    prepare(MODELS_DIR, recipes(), print)
    return StaticEmbedder(MODELS_DIR / "all-minilm-l6-v2-static")


def settings_of_pool(broker: str, pipeline: Pipeline) -> Settings:
    return Settings(
        kafka_bootstrap_servers=broker,
        retrieval_embedder="pool",
        retrieval_embedder_model=pipeline.models[0].model,
        retrieval_embedder_dimensions=384,
        retrieval_embedder_tenant=pipeline.tenant("a"),
    )


@pytest.fixture(scope="module")
def pool(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    """A dispatcher and a consumer with the real encoder."""
    broker: str = request.getfixturevalue("broker")
    folder, unique = tmp_path_factory.mktemp("embed-pool"), unique_name()
    model = ModelVersion(
        model=f"{unique}-encoder",
        version="1",
        pool=f"{unique}-pool",
        engine="torch-embedding",
        tasks=(str(Task.EMBED),),
        path="all-minilm-l6-v2",
        max_context_tokens=256,
        max_output_tokens=0,
    )
    env = {"MODELS_DIR": str(MODELS_DIR), "ENGINE_THREADS": "1", "DEVICE": "cpu"}
    with Pipeline(broker, folder, unique, tenants=("a",), models=[model], env=env) as pipeline:
        dispatcher = pipeline.dispatcher()
        arguments = ("-m", "inference_consumers", "--pool", pipeline.pool)
        consumer = pipeline.launch(Service(f"consumer-{pipeline.pool}-1", arguments, {}))
        for process in (dispatcher, consumer):
            process.wait_ready(START_S)
        pipeline.wait_all_own()
        yield settings_of_pool(broker, pipeline)


@pytest.fixture(scope="module", params=["static", "openai", pytest.param("pool", marks=pytest.mark.broker)])
def embedders(request: pytest.FixtureRequest, static: StaticEmbedder) -> Iterator[Embedders]:
    if request.param == "static":
        yield from both(Settings(retrieval_embedder="static", models_dir=MODELS_DIR))
    elif request.param == "openai":
        with embedding_server(static) as server:
            yield from both(
                Settings(
                    retrieval_embedder="openai",
                    retrieval_embedder_url=server.url,
                    retrieval_embedder_key=KEY,
                    retrieval_embedder_model="static",
                    retrieval_embedder_dimensions=static.dimensions,
                )
            )
    else:
        yield from both(request.getfixturevalue("pool"))


def both(settings: Settings) -> Iterator[Embedders]:
    bulk, queries = embedder_for(settings), query_embedder_for(settings)
    with asyncio.Runner() as loop:
        yield Embedders(bulk, queries, loop)
        loop.run(queries.aclose())
        loop.run(queries.aclose())
    bulk.close()
    bulk.close()


def test_vectors_are_of_unit_length_and_near_for_texts_that_mean_the_same(embedders: Embedders) -> None:
    vectors = embedders.bulk.embed(TEXTS)
    assert vectors.shape == (len(TEXTS), embedders.bulk.dimensions)
    assert vectors.dtype == np.float32
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(1.0, abs=1e-5)
    near = vectors @ vectors.T
    assert near[0, 1] > 0.4
    assert max(near[0, 2], near[1, 2]) < 0.2


def test_a_query_is_embedded_as_a_text_is(embedders: Embedders) -> None:
    assert (embedders.bulk.name, embedders.bulk.dimensions) == (embedders.queries.name, embedders.queries.dimensions)
    for text, vector in zip(TEXTS, embedders.bulk.embed(TEXTS), strict=True):
        assert embedders.query(text) == pytest.approx(vector, abs=1e-4)


def test_a_vector_depends_on_its_text_alone_and_stands_in_its_place(embedders: Embedders) -> None:
    many = [f"Text number {number} is about {TEXTS[number % 3]}" for number in range(150)]
    together = embedders.bulk.embed(many)
    assert together.shape == (150, embedders.bulk.dimensions)
    for index in (0, 1, 33, 149):
        assert together[index] == pytest.approx(embedders.bulk.embed([many[index]])[0], abs=1e-4)


def test_nothing_known_is_zeros_and_no_texts_are_no_vectors(embedders: Embedders) -> None:
    vectors = embedders.bulk.embed(["", TEXTS[0], " \n\t"])
    assert not vectors[[0, 2]].any()
    assert vectors[1] == pytest.approx(embedders.bulk.embed(TEXTS[:1])[0], abs=1e-4)
    assert not embedders.query(" ").any()
    assert embedders.bulk.embed([]).shape == (0, embedders.bulk.dimensions)


@pytest.mark.parametrize(
    "text", ["caf\u00e9 \u6f22\u5b57 \U0001f600", "half \ud83d a pair \ud800", "a\x00b", "[CLS] [SEP] [PAD]"]
)
def test_any_text_has_a_vector(embedders: Embedders, text: str) -> None:
    [vector] = embedders.bulk.embed([text])
    assert np.linalg.norm(vector) == pytest.approx(1.0, abs=1e-5)
    assert embedders.query(text) == pytest.approx(vector, abs=1e-4)


def test_queries_may_be_asked_at_the_same_time(embedders: Embedders) -> None:
    async def ask() -> list[FloatArray]:
        return await asyncio.gather(*(embedders.queries.embed_query(text) for text in TEXTS * 4))

    expected = embedders.bulk.embed(TEXTS * 4)
    assert np.array(embedders.loop.run(ask())) == pytest.approx(expected, abs=1e-4)


@pytest.mark.broker
def test_a_text_that_the_pool_cannot_take_is_an_error_without_the_text(pool: Settings) -> None:
    with contextmanager(both)(pool) as embedders:
        with pytest.raises(EmbedderError, match=r"context_too_long.*field input\.texts\[1\]") as caught:
            embedders.bulk.embed(["short", "secret " * 300])
        assert "secret" not in str(caught.value)
        with pytest.raises(EmbedderError, match="context_too_long"):
            embedders.query("secret " * 300)


@pytest.mark.broker
def test_other_dimensions_than_the_pool_gives_are_an_error(pool: Settings) -> None:
    wrong = embedder_for(pool.model_copy(update={"retrieval_embedder_dimensions": 256}))
    with pytest.raises(EmbedderError, match=r"\(3, 384\) instead of \(3, 256\)"):
        wrong.embed(TEXTS)
    wrong.close()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"retrieval_embedder": "openai"}, "RETRIEVAL_EMBEDDER_URL is needed"),
        ({"retrieval_embedder": "openai", "retrieval_embedder_url": "ftp://host/v1"}, "must begin with http"),
        (
            {"retrieval_embedder": "openai", "retrieval_embedder_url": "http://host:port/v1"},
            "the URL of the embedder is none",
        ),
        ({"retrieval_embedder": "pool"}, "RETRIEVAL_EMBEDDER_TENANT must name a tenant"),
        ({"retrieval_embedder": "pool", "retrieval_embedder_tenant": "No Name"}, "must name a tenant"),
        ({"retrieval_embedder_path": Path("nowhere")}, "nowhere: no static embedder is there; `python -m deploy"),
    ],
)
def test_a_setting_that_is_missing_or_wrong_is_named(fields: dict[str, Any], message: str) -> None:
    settings = Settings(**fields)
    with pytest.raises(EmbedderError, match=message):
        embedder_for(settings)
    with pytest.raises(EmbedderError, match=message):
        query_embedder_for(settings)
