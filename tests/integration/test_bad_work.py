"""What no engine can do, asked of real ones on the real broker: one refusal each, that names the field, the same from
the dispatcher and from a consumer that is handed it as work; and good requests around it that are all answered."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from deploy.local.services import Service
from fairlane import names
from fairlane.outcomes import FinishReason, Outcome, Task
from fairlane.records import InferenceReply, InferenceRequest
from tests.kit.bad_work import BAD, PATIENCE_MS, UNUSUAL, UNUSUAL_ENCODINGS, WHOLE, Bad, Make
from tests.kit.log_reader import LogReader, Replies
from tests.kit.model_kit import ANSWER, real_models, save_models
from tests.kit.pipeline import Pipeline, unique_name
from tests.kit.processes import ServiceProcess
from tests.kit.work_items import work_item, write_work

pytestmark = [pytest.mark.full, pytest.mark.broker, pytest.mark.model, pytest.mark.timeout(2 * 300)]

START_S = 300.0
ASKED, WORK = "as a request", "as work"
BOTH_WAYS = (ASKED, WORK)
both_ways = pytest.mark.parametrize("way", BOTH_WAYS)


@dataclass
class Bench:
    """A pipeline with a dispatcher and one consumer, whose engines are torch's."""

    pipeline: Pipeline
    consumer: ServiceProcess
    replies: Replies
    letters: LogReader
    engines: set[int]
    """The processes of the engines when all began."""
    good: list[str] = field(default_factory=list)

    def send(self, request: InferenceRequest, way: str) -> str:
        """As a client does, or past the dispatcher's checks. Returns its id."""
        if way == ASKED:
            self.pipeline.publish("a", request)
        else:
            write_work(self.pipeline, work_item(self.pipeline, request=request, deadline_ms=PATIENCE_MS))
        return request.request_id

    def send_good(self) -> None:
        """One good request for each engine."""
        requests = [self.pipeline.request(task, timeout_ms=PATIENCE_MS) for task in Task]
        self.pipeline.publish("a", *requests)
        self.good += [request.request_id for request in requests]

    def send_all(self, cases: list[tuple[str, Make, tuple[str, ...]]]) -> dict[tuple[str, str], InferenceReply]:
        """Each case in its ways, with good requests around it. Returns the reply to each, by its name and its way."""
        sent: dict[tuple[str, str], str] = {}
        for name, make, ways in cases:
            for way in ways:
                self.send_good()
                sent[name, way] = self.send(make(self.pipeline), way)
        self.send_good()
        answers = self.replies.wait([*sent.values(), *self.good], START_S)
        return {case: answers[request_id] for case, request_id in sent.items()}


@pytest.fixture(scope="module")
def bench(broker: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder, unique = tmp_path_factory.mktemp("bad-work"), unique_name()
    models_dir: Path = folder / "models"
    save_models(models_dir)
    env = {"MODELS_DIR": str(models_dir), "ENGINE_THREADS": "1", "DEVICE": "cpu"}
    models = real_models(unique, f"{unique}-pool")
    with Pipeline(broker, folder, unique, tenants=("a",), models=models, env=env) as pipeline:
        letters = pipeline.reader(names.DEAD_LETTER_REQUESTS, names.DEAD_LETTER_WORK, from_beginning=False)
        dispatcher = pipeline.dispatcher()
        arguments = ("-m", "inference_consumers", "--pool", pipeline.pool)
        consumer = pipeline.launch(Service(f"consumer-{pipeline.pool}-1", arguments, {}))
        for process in (dispatcher, consumer):
            process.wait_ready(START_S)
        pipeline.wait_all_own()
        yield Bench(pipeline, consumer, pipeline.replies("a"), letters, children_of(consumer))


def children_of(consumer: ServiceProcess) -> set[int]:
    return {child.pid for child in psutil.Process(consumer.pid).children()}


@pytest.fixture(scope="module")
def refused(bench: Bench) -> dict[tuple[str, str], InferenceReply]:
    return bench.send_all([(bad.name, bad.make, ways_of(bad)) for bad in BAD])


@pytest.fixture(scope="module")
def answered(bench: Bench) -> dict[tuple[str, str], InferenceReply]:
    cases = [*((name, make) for name, make, _ in UNUSUAL), *UNUSUAL_ENCODINGS]
    return bench.send_all([(name, make, BOTH_WAYS) for name, make in cases])


def ways_of(bad: Bad) -> tuple[str, ...]:
    return BOTH_WAYS if bad.can_be_work else (ASKED,)


@pytest.mark.parametrize(
    ("bad", "way"), [pytest.param(bad, way, id=f"{bad.name}-{way}") for bad in BAD for way in ways_of(bad)]
)
def test_what_cannot_be_done_is_refused_by_field(
    refused: dict[tuple[str, str], InferenceReply], bad: Bad, way: str
) -> None:
    reply = refused[bad.name, way]
    assert (reply.outcome, reply.code, reply.field) == (bad.outcome, bad.code, bad.field)
    assert reply.message
    assert reply.output is None
    reached_an_engine = way == WORK or bad.found_by_engine
    assert (reply.engine is not None) == reached_an_engine


@both_ways
@pytest.mark.parametrize(("name", "text"), [(name, text) for name, _, text in UNUSUAL])
def test_what_only_looks_wrong_is_answered(
    answered: dict[tuple[str, str], InferenceReply], name: str, text: str, way: str
) -> None:
    reply, usual = answered[name, way], answered["nothing unusual", way]
    assert (reply.outcome, reply.code) == (Outcome.OK, None)
    assert reply.output is not None
    assert usual.output is not None
    assert usual.output.text
    assert ANSWER.startswith(usual.output.text)
    assert reply.output.text == (usual.output.text if text == WHOLE else text)
    assert reply.finish_reason == (FinishReason.LENGTH if text == WHOLE else FinishReason.STOP)
    assert reply.usage.prompt_tokens > 0


@both_ways
@pytest.mark.parametrize("name", [name for name, _ in UNUSUAL_ENCODINGS])
def test_what_only_looks_wrong_is_encoded(answered: dict[tuple[str, str], InferenceReply], name: str, way: str) -> None:
    assert answered[name, way].outcome == Outcome.OK


def test_nobody_else_noticed(
    bench: Bench,
    refused: dict[tuple[str, str], InferenceReply],
    answered: dict[tuple[str, str], InferenceReply],
) -> None:
    """Every good request was answered, each once; no dead letter, no engine that died, nothing run twice."""
    bench.send_good()
    bench.replies.wait(bench.good, 60)
    bench.replies.read_to_end()
    found = bench.replies.exactly_once(
        [*bench.good, *(reply.request_id for reply in (*refused.values(), *answered.values()))]
    )
    assert {found[request_id].outcome for request_id in bench.good} == {Outcome.OK}
    assert bench.replies.counts.keys() == found.keys()
    bench.letters.read_to_end()
    assert bench.pipeline.dead_letters(bench.letters) == []
    assert children_of(bench.consumer) == bench.engines
    assert bench.consumer.metric("fairlane_engine_restarts_total") == 0
    assert bench.consumer.metric("fairlane_retries_total") == 0
    assert bench.consumer.stop() == 0
    assert "Traceback" not in bench.consumer.log()
