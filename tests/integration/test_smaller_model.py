"""Under load the shipped language model's int8 copy answers in its place, and says so; calm gives the model back."""

from collections.abc import Iterator
from dataclasses import replace
from time import monotonic

import pytest

from deploy.local.services import MODELS_FILE, Service
from deploy.models.prepare import prepare, recipes
from fairlane.outcomes import Degradation, Outcome
from fairlane.records import InferenceReply, Parameters
from fairlane_server.models.models_file import load_models
from tests.kit.engine_kit import LANGUAGE_MODEL, MODELS_DIR
from tests.kit.pipeline import Pipeline, unique_name
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.full, pytest.mark.model, pytest.mark.broker, pytest.mark.timeout(300)]

TARGET = {"LATENCY_TARGET_MS": "high=2000,normal=2000,low=2000"}
PATIENCE_S = 120.0
POLL_S = 0.1
MOST_WAITING, BURST = 48, 16
"""Requests: about 20 s of work, ten times the target."""


@pytest.fixture(scope="module")
def pipeline(broker: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    prepare(MODELS_DIR, recipes(), print)
    unique = unique_name()
    shipped = {model.model: model for model in load_models(MODELS_FILE)}
    large = shipped[LANGUAGE_MODEL.name]
    small = shipped[large.smaller_model or ""]
    names = {model.model: f"{unique}-{model.model}" for model in (large, small)}
    models = [
        replace(
            model,
            model=names[model.model],
            pool=f"{unique}-pool",
            smaller_model=names.get(model.smaller_model or ""),
        )
        for model in (large, small)
    ]
    folder = tmp_path_factory.mktemp("smaller")
    with Pipeline(broker, folder, unique, tenants=("a",), models=models, env=TARGET) as pipeline:
        arguments = ("-m", "inference_consumers", "--pool", models[0].pool)
        consumer = pipeline.launch(Service("consumer-1", arguments, {"MODELS_DIR": str(MODELS_DIR)}))
        pipeline.dispatcher().wait_ready()
        consumer.wait_ready(PATIENCE_S)
        pipeline.wait_all_own()
        yield pipeline


def test_the_int8_copy_answers_while_there_is_too_much_to_do(pipeline: Pipeline) -> None:
    large, small = (model.model for model in pipeline.models)
    replies = pipeline.replies("a")
    sent: set[str] = set()

    def answers() -> dict[str, InferenceReply]:
        return replies.exactly_once(sent & replies.by_id.keys())

    give_up_at = monotonic() + PATIENCE_S
    while not any(reply.model == small and reply.outcome == Outcome.OK for reply in answers().values()):
        assert monotonic() < give_up_at, f"{len(sent)} requests, and the small model answered none"
        if len(sent - replies.by_id.keys()) < MOST_WAITING:
            burst = [
                pipeline.request(prompt="Once upon a time there was a", parameters=Parameters(max_tokens=48))
                for _ in range(BURST)
            ]
            pipeline.publish("a", *burst)
            sent |= {request.request_id for request in burst}
        replies.reader.poll(POLL_S)
        replies.read_to_end()
    replies.wait(sent)
    for reply in answers().values():
        assert (reply.model == small) == (Degradation.SMALLER_MODEL in reply.degradations)
        assert reply.outcome in {Outcome.OK, Outcome.REJECTED}
        assert reply.output is None or reply.output.text
    assert {reply.model for reply in answers().values()} == {large, small}

    # The ladder gives a step back after five seconds of calm.
    def is_whole() -> bool:
        calm = pipeline.request(prompt="Once upon a time there was a", parameters=Parameters(max_tokens=4))
        pipeline.publish("a", calm)
        return replies.wait([calm.request_id])[calm.request_id].model == large

    eventually(is_whole, PATIENCE_S, "an answer of the model that was asked for")
