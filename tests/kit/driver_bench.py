"""A consumer's driver with engines that do what the test says, a clock that is the test's, and no broker."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fairlane.ownership import Claim
from fairlane.records import Output, Parameters, TokenUsage
from fairlane.schema_files import default_codec
from fairlane_server.kafka.settlement import Settlement
from inference_consumers.batching.batch_size import BatchLimits
from inference_consumers.batching.micro_batch import MicroBatcher
from inference_consumers.batching.received_work import ReceivedWork
from inference_consumers.batching.waiting_work import WaitingWork
from inference_consumers.driver import EngineDriver
from inference_consumers.engine_process.failures import EndKind, EngineEnd
from inference_consumers.engine_process.messages import Finished, Loaded, RunEnded, RunStep, Text
from inference_consumers.engine_process.stall_detection import StallTimeouts
from inference_consumers.engine_process.states import EngineState, EngineStates
from inference_consumers.engines.protocol import EngineItem, ItemOutcome, Problem, Success
from inference_consumers.guardrails.stage import Checks, NoChecks, input_job
from inference_consumers.results.chunk_writer import StreamedText
from inference_consumers.results.dead_letter_share import DeadLetterShare
from inference_consumers.results.records import AnswerWriter
from inference_consumers.results.result_writer import ResultWriter
from tests.kit.micro_batch_kit import MODEL, work

OK = Success(Output(text="yes"), TokenUsage(prompt_tokens=7, completion_tokens=3))
PATIENCE = StallTimeouts(120_000)
CRASHED = EngineEnd(EndKind.CRASHED, "killed by SIGSEGV")
KILLED = EngineEnd(EndKind.KILLED, "killed by SIGKILL")


@dataclass
class FakeHost:
    """Remembers what it was given."""

    key: tuple[str, str] = MODEL
    life: int = 1
    given: list[tuple[int, tuple[EngineItem, ...]]] = field(default_factory=list)
    cancelled: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    killed: list[EngineEnd] = field(default_factory=list)
    is_stopped: bool = False
    cpu_ms: int | None = None
    held_bytes: int = 0
    before_run: Callable[[], None] = lambda: None

    def run(self, run_id: int, items: Sequence[EngineItem], life: int) -> None:
        self.before_run()
        if life == self.life:
            self.given.append((run_id, tuple(items)))

    def cancel(self, run_id: int, indexes: Sequence[int]) -> None:
        self.cancelled.append((run_id, tuple(indexes)))

    def kill(self, end: EngineEnd) -> None:
        self.killed.append(end)

    def close(self, timeout_s: float) -> None: ...


class FakeTransactions:
    """Takes settlements and commits none."""

    pending_count = 0

    def __init__(self) -> None:
        self.settlements: list[Settlement] = []

    def submit(self, settlement: Settlement) -> None:
        self.submit_many([settlement])

    def commit_positions(self) -> None: ...

    def submit_many(self, settlements: Sequence[Settlement]) -> None:
        self.settlements.extend(settlements)


class FakeChunks:
    """Keeps what is streamed."""

    def __init__(self) -> None:
        self.written: list[StreamedText] = []

    def write(self, texts: Sequence[StreamedText]) -> None:
        self.written.extend(texts)


class DriverBench:
    """One engine, loaded."""

    def __init__(
        self,
        *,
        max_items: int = 4,
        max_tokens: int = 1_000,
        continuous: bool = False,
        checks: Checks | None = None,
        hold_back: int = 0,
    ) -> None:
        self.now_ms = 1_000
        self.host = FakeHost()
        self.transactions, self.chunks = FakeTransactions(), FakeChunks()
        self.fatal: list[Exception] = []
        self.revoked: set[Claim] = set()
        codec = default_codec()
        limits = BatchLimits(max_items=max_items, max_tokens=max_tokens, timeout_ms=0)
        loop: Any = self.transactions
        chunks: Any = self.chunks
        self.driver = EngineDriver(
            waiting=WaitingWork(MicroBatcher(limits), copies=WaitingWork(MicroBatcher(limits))),
            engines=EngineStates({MODEL: EngineState(self.host, max_items, max_tokens)}),
            transactions=loop,
            settler=ResultWriter(AnswerWriter(codec, "consumer-1")),
            chunks=chunks,
            timeouts=PATIENCE,
            dead_letters=DeadLetterShare(1.0),
            clock=lambda: self.now_ms,
            on_fatal=self.fatal.append,
            chance=lambda: 0.0,
            checks=checks or NoChecks(),
            hold_back=hold_back,
            is_current=lambda claim: claim not in self.revoked,
        )
        self.load(continuous=continuous)

    def load(self, *, continuous: bool = False) -> None:
        self.driver.engine_loaded(self.host, Loaded("fake", continuous, 0.1))

    def add(self, *more: ReceivedWork) -> list[str]:
        for one in more:
            self.driver.waiting.add(one)
        return [one.request_id for one in more]

    def receive(self, *more: ReceivedWork) -> None:
        """As a consumer does with what it reads: input that is to be checked does not wait for an engine yet."""
        driver = self.driver
        jobs = [(one, None if one.item.guardrails is None else input_job(one)) for one in more]
        with driver.changed:
            for one, job in jobs:
                if job is None:
                    driver.waiting.add(one)
                else:
                    driver.guardrails.add(job)
        driver.guardrails.pump()

    def start(self) -> list[str]:
        """Start the run that is due; the ids of its items, none when nothing is due."""
        if not self.driver.start_one():
            return []
        return [item.item_id for item in self.host.given[-1][1]]

    @property
    def run_id(self) -> int:
        """Of the run that was started last."""
        return self.host.given[-1][0]

    def tell(self, outcomes: dict[int, ItemOutcome], texts: Sequence[tuple[int, str]] = (), run_id: int = 0) -> None:
        finished = tuple(Finished(index, outcome) for index, outcome in outcomes.items())
        step = RunStep(run_id or self.run_id, tuple(Text(index, delta) for index, delta in texts), finished)
        self.driver.engine_stepped(self.host, step)

    def end(self, problem: Problem | None = None, run_id: int = 0, seconds: float = 0.1) -> None:
        self.driver.engine_ended(self.host, RunEnded(run_id or self.run_id, seconds, problem=problem))

    def die(self, end: EngineEnd = CRASHED) -> None:
        self.driver.engine_died(self.host, end)
        self.host.life += 1

    def run_all(self, outcome: ItemOutcome = OK) -> None:
        """Run what waits, with this outcome for each."""
        while ids := self.start():
            self.tell(dict.fromkeys(range(len(ids)), outcome))
            self.end()

    def written(self, topic: str) -> list[Any]:
        """Records of a topic, decoded, in order."""
        outputs = (output for settled in self.transactions.settlements for output in settled.outputs)
        return [default_codec().decode(output.value) for output in outputs if output.topic == topic]

    @property
    def replies(self) -> list[Any]:
        return self.written("replies.acme")


def named(name: str, **fields: Any) -> ReceivedWork:
    """A work item with this id; ``fields`` as in ``work``."""
    made = work(**fields)
    return replace(made, item=replace(made.item, request=replace(made.item.request, request_id=name)))


def streaming(one: ReceivedWork) -> ReceivedWork:
    """The same with its text streamed."""
    request = replace(one.item.request, parameters=Parameters(stream=True))
    return replace(one, item=replace(one.item, request=request), generation=5)
