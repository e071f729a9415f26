"""Engines of remote endpoints against real servers: vLLM's server with OpenAI's interface, and KServe.

``SKIP_VLLM=1`` and ``SKIP_KSERVE=1`` skip them.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest

from deploy.models.digits_data import load_split
from deploy.models.prepare import prepare, recipes
from fairlane.outcomes import Code, FinishReason
from fairlane.records import ModelVersion, Passage, RequestInput, TokenUsage
from inference_consumers.engines.protocol import (
    CancelledItem,
    Engine,
    EngineLoadError,
    EngineSpec,
    Failure,
    Outcomes,
    Success,
    run_batch,
)
from inference_consumers.engines.registry import create_engine
from inference_consumers.engines.remote.endpoints import ModelEndpoint, ModelEndpoints
from inference_consumers.engines.remote.engine import RemoteEngine
from tests.integration.test_remote_engines import PROMISES
from tests.kit.encoder_kit import embed, rank
from tests.kit.engine_kit import FARES, LANGUAGE_MODEL, MODELS_DIR, chat, classify, streamed, text_of
from tests.kit.real_servers import kserve_server, needs_kserve, needs_vllm, vllm_server
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.full, pytest.mark.model, pytest.mark.timeout(400)]

FRANCE, STORY = "What is the capital of France?", "Write a long story about the sea."
CONTEXT_TOKENS = 1_024


def spec_of_endpoint(engine: str, tasks: tuple[str, ...], folder: str, url: str, served_name: str) -> EngineSpec:
    entry = ModelEndpoints("remote", "1", (ModelEndpoint(url, served_name=served_name),))
    model = ModelVersion("remote", "1", "p", engine, tasks, folder, CONTEXT_TOKENS, 512, 16, 8_192)
    return EngineSpec(model, str(MODELS_DIR), endpoints=entry)


# --- vLLM -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def vllm_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    prepare(MODELS_DIR, recipes(), print)
    log_file = tmp_path_factory.mktemp("vllm") / "server.log"
    with vllm_server(LANGUAGE_MODEL, "smollm", CONTEXT_TOKENS, log_file) as url:
        yield url


@pytest.fixture(scope="module")
def of_vllm(vllm_url: str) -> Iterator[dict[str, RemoteEngine]]:
    """By the mode: the prompts as tokens, which the tokenizer of the folder gives, and as messages."""
    with ExitStack() as stack:
        engines: dict[str, RemoteEngine] = {}
        for mode, folder in (("tokens", LANGUAGE_MODEL.name), ("messages", "no-folder")):
            engine = create_engine(spec_of_endpoint("openai-endpoint", ("generate",), folder, vllm_url, "smollm"))
            assert isinstance(engine, RemoteEngine)
            engine.load()
            stack.callback(engine.close)
            engines[mode] = engine
        yield engines


@needs_vllm
@pytest.mark.parametrize("promise", PROMISES)
def test_vllm_does_what_every_engine_does(
    of_vllm: dict[str, RemoteEngine], promise: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With prompts as tokens: the same suite as the torch engine and the local vLLM."""
    monkeypatch.setitem(FARES, "openai-endpoint", FARES["torch-causal-lm"])
    engines: dict[str, Engine] = {"openai-endpoint": of_vllm["tokens"]}
    promise(engines=engines, name="openai-endpoint")


@needs_vllm
def test_both_modes_give_the_same_prompt_to_vllm(of_vllm: dict[str, RemoteEngine]) -> None:
    passage = Passage("p", "The capital of Atlantis is Poseidonis.", 1.0)
    items = [
        streamed(chat(FRANCE)),
        chat(FRANCE, stop=("ance is Par",)),
        chat(FRANCE, logprobs=2),
        replace(chat("What is the capital of Atlantis?"), passages=(passage,)),
    ]
    by_tokens, by_messages = (run_batch(of_vllm[mode], items) for mode in ("tokens", "messages"))
    for left, right in zip(by_tokens[:3], by_messages[:3], strict=True):
        assert isinstance(left, Success)
        assert isinstance(right, Success)
        assert text_of(left) == text_of(right)
        assert (left.usage.prompt_tokens, left.usage.completion_tokens, left.finish_reason) == (
            right.usage.prompt_tokens,
            right.usage.completion_tokens,
            right.finish_reason,
        )
    assert text_of(by_tokens[0]) == "The capital of France is Paris."
    assert text_of(by_tokens[1]) == "The capital of Fr"
    for outcome in (by_tokens[2], by_messages[2]):
        assert isinstance(outcome, Success)
        assert outcome.output.logprobs is not None
        assert "".join(one.token for one in outcome.output.logprobs) == outcome.output.text
        assert {len(one.top) for one in outcome.output.logprobs} == {2}
    # The template of the folder is in the prompt of the one alone; the passage in both.
    assert all("Poseidonis" in text_of(outcome) for outcome in (by_tokens[3], by_messages[3]))


@needs_vllm
def test_vllm_refuses_what_is_too_long_and_the_consumer_may_shorten_it(of_vllm: dict[str, RemoteEngine]) -> None:
    for engine in of_vllm.values():
        failed, answered = run_batch(engine, [chat("word " * 4_000), chat(FRANCE)])
        assert isinstance(failed, Failure)
        assert (failed.code, failed.field) == (Code.CONTEXT_TOO_LONG, "input")
        assert isinstance(answered, Success)


@needs_vllm
def test_vllm_stops_what_is_cancelled(of_vllm: dict[str, RemoteEngine]) -> None:
    engine, outcomes = of_vllm["tokens"], Outcomes()
    engine.join([streamed(chat(STORY, 400)), chat("Hello", 2)], outcomes)
    eventually(lambda: outcomes.texts, what="the first text")
    engine.cancel([STORY])
    eventually(lambda: len(outcomes.by_index) == 2, what="both outcomes")
    cancelled, short = outcomes.by_index[0], outcomes.by_index[1]
    assert isinstance(cancelled, CancelledItem)
    assert 0 < cancelled.usage.completion_tokens < 400
    assert isinstance(short, Success)
    assert short.finish_reason == FinishReason.LENGTH


@needs_vllm
def test_a_model_that_vllm_does_not_serve_is_a_load_error(vllm_url: str) -> None:
    spec = spec_of_endpoint("openai-endpoint", ("generate",), "no-folder", vllm_url, "large")
    with pytest.raises(EngineLoadError, match=r"no endpoint serves it: .*it does not serve 'large'"):
        create_engine(spec).load()


# --- KServe -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kserve_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    prepare(MODELS_DIR, recipes(), print)
    split = load_split()
    pixels = np.asarray(split.train_images, np.float64).reshape(len(split.train_labels), -1) / 255
    folder = tmp_path_factory.mktemp("kserve")
    labels = np.asarray(split.train_labels)
    np.save(folder / "centroids.npy", np.stack([pixels[labels == digit].mean(0) for digit in range(10)]))
    with kserve_server(folder / "centroids.npy", folder / "server.log") as url:
        yield url


@needs_kserve
def test_digits_are_classified_by_kserve(kserve_url: str) -> None:
    engine = create_engine(spec_of_endpoint("v2-endpoint", ("classify",), "digits", kserve_url, "digits"))
    engine.load()
    split = load_split()
    items = [classify(image.tobytes()) for image in split.test_images[:200]]
    outcomes = run_batch(engine, items)
    [wrong] = run_batch(engine, [replace(items[0], input=RequestInput(image=b"x" * 63))])
    engine.close()
    right = 0
    for outcome, label in zip(outcomes, split.test_labels, strict=False):
        assert isinstance(outcome, Success)
        assert outcome.output.labels is not None
        assert len(outcome.output.labels) == 10
        right += outcome.output.labels[0].label == str(label)
    assert right > 160, "the nearest mean picture is right 8 times of 10 and more"
    assert isinstance(wrong, Failure)
    assert (wrong.code, wrong.field) == (Code.INVALID, "input.image")


@needs_kserve
def test_texts_are_embedded_and_ranked_by_kserve(kserve_url: str) -> None:
    texts = ("the sea is wide", "stone walls", "caf\u00e9 \U0001f600", "\ud800 lone", "")
    vectors = create_engine(spec_of_endpoint("v2-endpoint", ("embed",), "no-folder", kserve_url, "vectors"))
    pairs = create_engine(spec_of_endpoint("v2-endpoint", ("rank",), "no-folder", kserve_url, "pairs"))
    for engine in (vectors, pairs):
        engine.load()
    [embedded] = run_batch(vectors, [embed(*texts)])
    [ranked] = run_batch(pairs, [rank("wide sea", "stone walls", "the sea is wide")])
    [refused] = run_batch(pairs, [embed("a text")])
    for engine in (vectors, pairs):
        engine.close()
    assert isinstance(embedded, Success)
    assert embedded.output.embeddings is not None
    assert {len(vector) for vector in embedded.output.embeddings} == {64}
    assert embedded.usage.prompt_tokens > 0
    assert isinstance(ranked, Success)
    assert ranked.output.scores is not None
    assert ranked.output.scores[1] > ranked.output.scores[0]
    assert ranked.usage != TokenUsage()
    assert isinstance(refused, Failure)
    assert refused.field == "task"


@needs_kserve
def test_a_model_that_kserve_does_not_have_is_a_load_error(kserve_url: str) -> None:
    with pytest.raises(EngineLoadError, match=r"no endpoint serves it: .*it answered 404"):
        create_engine(spec_of_endpoint("v2-endpoint", ("embed",), "no-folder", kserve_url, "none")).load()
