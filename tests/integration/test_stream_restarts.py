"""Who makes an answer is killed in the middle of it: what the client that streams it sees.

The answers of these engines say which process made them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import psutil
import pytest

from deploy.local.services import Service
from fairlane.client import Client, TextDelta
from fairlane.outcomes import Outcome, Task
from fairlane.records import InferenceReply
from tests.kit.pipeline import Pipeline, unique_name
from tests.kit.processes import ServiceProcess
from tests.kit.waiting import eventually

pytestmark = pytest.mark.broker

WORDS = 80
WORDS_PER_S = 20
"""Slow enough that whoever is killed after a few words has most of the answer before it."""
PATIENCE_MS = 120_000
WAIT_S = 30


@pytest.fixture(scope="module")
def pipeline(broker: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    """A pool of two consumers, both known to the dispatcher."""
    env = {"SIMULATED_DECODE_TOKENS_PER_S": str(WORDS_PER_S)}
    with Pipeline(broker, tmp_path_factory.mktemp("streams"), unique_name(), tenants=("a",), env=env) as pipeline:
        dispatcher = pipeline.dispatcher()
        for consumer in [start_consumer(pipeline, number) for number in (1, 2)]:
            consumer.wait_ready()
        dispatcher.wait_ready()
        pipeline.wait_all_own()
        eventually(lambda: dispatcher.metric("fairlane_pool_consumers", pool=pipeline.pool) == 2, what="both")
        yield pipeline


def start_consumer(pipeline: Pipeline, number: int) -> ServiceProcess:
    arguments = ("-m", "tests.kit.troubled_consumer", "--pool", pipeline.pool)
    return pipeline.launch(Service(f"consumer-{pipeline.pool}-{number}", arguments, {}))


@dataclass(frozen=True, slots=True)
class Streamed:
    """What came before the text began again, the deltas from there on, and the reply."""

    before: str
    again: list[TextDelta]
    text: str
    reply: InferenceReply

    @property
    def makers(self) -> list[set[str]]:
        """The processes that made the first text and the second one."""
        return [{word for word in text.split() if word.isdigit()} for text in (self.before, self.text)]


def stream_and(pipeline: Pipeline, kill: Callable[[psutil.Process], None]) -> Streamed:
    """Stream an answer and ``kill`` when some of it is here; ``kill`` is given the engine's process."""
    model = pipeline.model_for(Task.GENERATE)
    with (
        Client(pipeline.tenant("a"), pipeline.settings.kafka_bootstrap_servers) as client,
        client.stream(model=model, prompt="hi", max_tokens=WORDS, timeout_ms=PATIENCE_MS, timeout=WAIT_S) as stream,
    ):
        before = ""
        while len(before.split()) < 4:
            before += next(stream).text
        kill(psutil.Process(int(before.split()[0])))
        deltas = list(stream)
        text, reply = stream.text, stream.reply()
    restarts = [place for place, delta in enumerate(deltas) if delta.restarted]
    assert len(restarts) == 1, deltas
    before += "".join(delta.text for delta in deltas[: restarts[0]])
    return Streamed(before, deltas[restarts[0] :], text, reply)


def check(pipeline: Pipeline, streamed: Streamed) -> None:
    """The text that was begun again is that of the one reply, and was read while it was made."""
    reply, again = streamed.reply, streamed.again
    assert reply.outcome == Outcome.OK
    assert reply.output is not None
    assert "".join(delta.text for delta in again) == streamed.text == reply.output.text
    assert len(streamed.text.split()) == WORDS
    assert {delta.attempt for delta in again} == {2}
    assert len(again[0].text.split()) < WORDS / 2, "the client knew before the reply came"
    assert len(again) > 4
    assert len(streamed.before.split()) < WORDS, "it was killed in the middle"
    [first], [second] = streamed.makers
    assert first != second
    replies = pipeline.replies("a")
    replies.wait([reply.request_id])
    replies.read_to_end()
    assert replies.exactly_once([reply.request_id])[reply.request_id].output == reply.output


def test_an_engine_that_is_killed_begins_its_answer_again(pipeline: Pipeline) -> None:
    consumers: list[psutil.Process | None] = []

    def kill(engine: psutil.Process) -> None:
        consumers.append(engine.parent())
        engine.kill()

    streamed = stream_and(pipeline, kill)
    check(pipeline, streamed)
    [second] = streamed.makers[1]
    assert consumers == [psutil.Process(int(second)).parent()], "the same consumer, with another engine"
    assert streamed.reply.attempts == 2


def test_what_a_killed_consumer_streamed_another_one_begins_again(pipeline: Pipeline) -> None:
    owners = {process.pid: process for name, process in pipeline.processes.items() if name.startswith("consumer-")}
    killed: list[ServiceProcess] = []

    def kill(engine: psutil.Process) -> None:
        killed.append(owners[engine.ppid()])
        killed[0].kill()

    streamed = stream_and(pipeline, kill)
    check(pipeline, streamed)
    [survivor] = [process for process in owners.values() if process.alive]
    [second] = streamed.makers[1]
    assert psutil.Process(int(second)).ppid() == survivor.pid
    assert killed != [survivor]
