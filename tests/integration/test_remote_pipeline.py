"""A model of remote endpoints in the whole pipeline: through Kafka to two servers, of which one is killed."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.local.services import Service
from fairlane.outcomes import Outcome
from fairlane.records import ModelVersion, Parameters
from inference_consumers.results.retries import MAX_TRIES
from tests.kit.log_reader import Replies
from tests.kit.model_servers import MODEL, OpenAiModelServer, model_server
from tests.kit.pipeline import Pipeline
from tests.kit.processes import ServiceProcess
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.full, pytest.mark.broker]

PROJECT = Path(__file__).parents[2]
REQUESTS = 24


@contextmanager
def server_process() -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """A server that answers nothing after the first part, and its URL."""
    command = (sys.executable, "-m", "tests.kit.model_servers", "openai", "held")
    with subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


@dataclass(frozen=True)
class _Started:
    pipeline: Pipeline
    consumer: ServiceProcess
    replies: Replies


@contextmanager
def started(broker: str, folder: Path, unique: str, entry: dict[str, Any]) -> Iterator[_Started]:
    """A pipeline whose one model is that of this entry of the endpoints file, with a consumer that is ready."""
    pool, model = f"{unique}-pool", f"{unique}-remote"
    version = ModelVersion(model, "1", pool, "openai-endpoint", ("generate",), "no-folder", 512, 64, 16, 8_192)
    file = folder / "endpoints.yaml"
    file.write_text(yaml.safe_dump({"models": [{"model": model, **entry}]}))
    with Pipeline(broker, folder, unique, tenants=("a",), models=[version]) as pipeline:
        arguments = ("-m", "inference_consumers", "--pool", pool)
        consumer = pipeline.launch(Service("consumer-1", arguments, {"ENDPOINTS_FILE": str(file)}))
        pipeline.dispatcher().wait_ready()
        consumer.wait_ready(120)
        pipeline.wait_all_own()
        yield _Started(pipeline, consumer, pipeline.replies("a"))


def test_every_request_is_answered_once_though_a_server_is_killed(broker: str, tmp_path: Path, unique: str) -> None:
    survivor = OpenAiModelServer()
    with server_process() as (doomed, doomed_url), model_server(survivor):
        # The trial of a consumer goes to the first one.
        endpoints = [{"url": url, "served_name": MODEL, "max_concurrent": 4} for url in (survivor.url, doomed_url)]
        entry = {"health_interval_s": 0.5, "wait_s": 0.5, "endpoints": endpoints}
        with started(broker, tmp_path, unique, entry) as stack:
            pipeline, consumer, replies = stack.pipeline, stack.consumer, stack.replies
            parameters = Parameters(max_tokens=5)
            requests = [
                pipeline.request(prompt=f"question {at}", parameters=parameters, timeout_ms=300_000)
                for at in range(REQUESTS)
            ]
            ids = {request.request_id for request in requests}
            pipeline.publish("a", *requests)

            def answered_count() -> int:
                replies.read_to_end()
                return len(ids & replies.by_id.keys())

            # What the other server holds is all that is left.
            eventually(lambda: answered_count() == REQUESTS - 4, 60, "the survivor's replies")
            doomed.kill()
            answers = replies.wait(ids, 60)
            assert {answer.outcome for answer in answers.values()} == {Outcome.OK}
            eventually(lambda: consumer.metric("fairlane_endpoint_ejected") == 1, 30, "the ejection in the metrics")
            more = [pipeline.request(prompt=f"later {at}", parameters=parameters) for at in range(8)]
            pipeline.publish("a", *more)
            ids |= {request.request_id for request in more}
            replies.wait(ids, 60)
            assert consumer.stop() == 0
            replies.read_to_end()
            answered = replies.exactly_once(ids)
            assert {answer.outcome for answer in answered.values()} == {Outcome.OK}
            assert all(answer.output is not None and answer.output.text for answer in answered.values())


def test_an_outage_of_all_servers_delays_requests_and_fails_none(broker: str, tmp_path: Path, unique: str) -> None:
    server = OpenAiModelServer()
    with model_server(server):
        endpoints = [{"url": server.url, "served_name": MODEL}]
        entry = {"health_interval_s": 0.2, "wait_s": 0.2, "endpoints": endpoints}
        with started(broker, tmp_path, unique, entry) as stack:
            pipeline, consumer, replies = stack.pipeline, stack.consumer, stack.replies
            server.check_status = 500
            eventually(lambda: consumer.metric("fairlane_endpoint_ejected") == 1, 30, "the outage")
            requests = [pipeline.request(prompt=f"question {at}", timeout_ms=300_000) for at in range(8)]
            ids = {request.request_id for request in requests}
            pipeline.publish("a", *requests)
            # More runs than a failure that counts as a try would allow.
            eventually(lambda: consumer.metric("fairlane_retries_total") >= 8 * MAX_TRIES, 60, "runs in the outage")
            server.check_status = 200
            replies.wait(ids, 60)
            assert consumer.stop() == 0
            replies.read_to_end()
            answered = replies.exactly_once(ids)
            assert {answer.outcome for answer in answered.values()} == {Outcome.OK}
            assert max(answer.attempts for answer in answered.values()) > MAX_TRIES
