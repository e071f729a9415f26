"""Driver of the engines: gives them work and settles the outcomes they report.

A feeding thread picks what runs next; the engines' own threads bring the outcomes, which are settled as they come. All
state is changed under one lock, and nothing is sent, encoded or written with it held.
"""

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fairlane import metrics
from fairlane.clock import ClockMs
from fairlane.logs import get_logger
from fairlane.outcomes import Code
from fairlane.ownership import Claim
from fairlane.records import TokenUsage
from fairlane_server.kafka.transactions import Settlement, TransactionLoop
from inference_consumers.batching.batch_size import BatchLimits
from inference_consumers.batching.received_work import ModelKey, ReceivedWork
from inference_consumers.batching.waiting_work import WaitingWork
from inference_consumers.cancellations import Cancellations
from inference_consumers.capacity.measurement import BusyTime, BusyWindow, CapacityMeter
from inference_consumers.engine_process.failures import EngineEnd
from inference_consumers.engine_process.messages import Loaded, RunEnded, RunStep
from inference_consumers.engine_process.stall_detection import StallTimeouts
from inference_consumers.engine_process.states import ActiveRun, EngineState, EngineStates, Host, engine_items
from inference_consumers.engines.protocol import CancelledItem, Failure, ItemOutcome, LoadFailed, Problem, Success
from inference_consumers.guardrails.stage import Checks, Guardrails, NoChecks, RunKey, concerns_answers
from inference_consumers.results.chunk_writer import ChunkWriter, StreamedText
from inference_consumers.results.dead_letter_share import DeadLetterShare
from inference_consumers.results.result_writer import ResultWriter
from inference_consumers.results.retries import Again, Verdict, after_death, after_failure, after_problem
from inference_consumers.results.settled import EngineRun, Settled

log = get_logger(__name__)

_MAX_UNCOMMITTED_BATCHES = 4
_ROOM_RECHECK_S = 0.005
_LONGEST_WAY_S = 0.1
"""What is longer is a pause of this process, or a clock that was set, and says nothing of the next batch."""


class EngineFailedError(Exception):
    """An engine that has served cannot be loaded again."""


class TooManyDeadLettersError(Exception):
    """So much of the work ends among the dead letters that the engine or the topic must be at fault."""


@dataclass(slots=True)
class EngineDriver:
    """``changed`` is the lock of everything here, and is notified when there may be something to pick. ``checks`` are
    those that ``guardrails`` asks."""

    waiting: WaitingWork
    engines: EngineStates
    transactions: TransactionLoop
    settler: ResultWriter
    chunks: ChunkWriter
    timeouts: StallTimeouts
    dead_letters: DeadLetterShare
    clock: ClockMs
    on_fatal: Callable[[Exception], None]
    cancellations: Cancellations = field(default_factory=Cancellations)
    is_current: Callable[[Claim], bool] = lambda _claim: True
    """Whether the partition of a claim is still this member's, as when it was delivered."""
    changed: threading.Condition = field(default_factory=threading.Condition)
    meter: CapacityMeter = field(default_factory=CapacityMeter)
    chance: Callable[[], float] = random.random
    checks: Checks = field(default_factory=NoChecks)
    hold_back: int = 200
    """Characters of a streamed answer whose output is checked."""
    guardrails: Guardrails = field(init=False)
    _busy: BusyWindow = field(default_factory=BusyWindow)
    _busy_time: BusyTime = field(default_factory=BusyTime)
    _stopping: bool = False
    _telling: int = 0
    _last_run_at_ms: int = 0
    _last_run_items: int = 0

    def __post_init__(self) -> None:
        self.guardrails = Guardrails(
            self.checks, self, self.changed, self.clock, self.is_current, hold_back=self.hold_back
        )

    def feed(self) -> None:
        """The feeding thread: one run after another until ``stop``."""
        while True:
            with self.changed:
                started = None
                yielding: list[tuple[Host, int, tuple[int, ...]]] = []
                while not (self._stopping or (started := self._start()) or (yielding := self._yielding())):
                    self.changed.wait(self._pause_s())
                is_over = self._stopping and started is None
                yielding = yielding or self._yielding()
            if started is not None:
                self._send(*started)
            self._end_copies(yielding)
            if is_over:
                return

    def start_one(self) -> bool:
        """Start the run that is due now; False when none is."""
        with self.changed:
            started = self._start()
            yielding = self._yielding()
        if started is not None:
            self._send(*started)
        self._end_copies(yielding)
        return started is not None

    def stop(self) -> None:
        with self.changed:
            self._stopping = True
            self.changed.notify_all()

    def end_checks(self) -> None:
        """Forget what is being checked; after ``stop``. It stays undone in the log."""
        with self.changed:
            self.guardrails.stop()

    @property
    def is_at_rest(self) -> bool:
        """Whether nothing runs and all outcomes were passed on."""
        with self.changed:
            return self._rests()

    @property
    def is_done(self) -> bool:
        with self.changed:
            return self._rests() and not self.waiting and not self.guardrails.input_count

    @property
    def lost_engines(self) -> list[str]:
        with self.changed:
            return self.engines.lost

    @property
    def served(self) -> tuple[tuple[ModelKey, ...], BatchLimits]:
        """The versions that can run now or are being started again, and are to stay; and the largest batch of them."""
        with self.changed:
            versions, batcher = self.engines.loaded, self.waiting.batcher
            return versions, batcher.largest(versions)

    def take_unserved(self) -> list[ReceivedWork]:
        """Remove the work of versions that this consumer does not serve any more. Under the lock."""
        unserved = {key for key in self.waiting.waiting_models if not self.engines.serves(key)}
        return self.waiting.take(lambda work: work.model_key in unserved) if unserved else []

    def idle_ms(self, now_ms: int) -> int:
        """Since the end of the last run; 0 while something runs. Under the lock."""
        return 0 if self.engines.runs else now_ms - self._last_run_at_ms

    def count_busy(self, now_ms: int) -> None:
        """Count the time that engines have run until now. Under the lock."""
        for state in self.engines:
            self._count_busy(state, now_ms)

    def submit(self, settled: Sequence[Settled]) -> None:
        """Hand answers to the transactions; not under the lock."""
        settlements: list[Settlement] = []
        for one in settled:
            dead = isinstance(one.outcome, Failure) and one.outcome.code == Code.POISON
            # A candidate that fails on every copy says nothing of this process.
            if one.work.is_copy or self.count_dead(one.work.item.tenant, dead=dead):
                settlements.append(self.settler.settle(one.work, one.outcome, one.run))
        if settlements:
            self.transactions.submit_many(settlements)

    def input_passed(self, work: ReceivedWork) -> None:
        """Its guardrails let it pass. Under the lock."""
        self.waiting.add(work)
        self.changed.notify_all()

    def write(self, texts: Sequence[StreamedText]) -> None:
        self.chunks.write(texts)

    def stop_item(self, key: RunKey) -> None:
        """Stop an item whose text a guardrail refused; not under the lock."""
        with self.changed:
            run = self.engines.runs.get(key[0])
            host = None if run is None else self.engines.by_key[run.model_key].host
        if host is not None:
            host.cancel(key[0], (key[1],))

    def is_cancelled(self, work: ReceivedWork) -> bool:
        return self.cancellations.is_cancelled(work.item.tenant, work.request_id, work.item.submitted_at_ms)

    def count_dead(self, tenant: str | None, *, dead: bool) -> bool:
        """Count a settled item; None for the tenant of what cannot be read. False when too many are dead letters: then
        it must not be settled, and the process ends."""
        with self.changed:
            self.dead_letters.settled(tenant, dead=dead, now_ms=self.clock())
            exceeded = self.dead_letters.exceeded() if dead else None
        if exceeded is not None:
            self.on_fatal(TooManyDeadLettersError(exceeded))
        return exceeded is None

    def engine_loaded(self, host: Host, loaded: Loaded) -> None:
        with self.changed:
            state = self.engines.by_key[host.key]
            state.name, state.is_continuous, state.life = loaded.name, loaded.continuous, host.life
            state.is_loaded = state.has_been_loaded = True
            state.memory = loaded.memory
            self.changed.notify_all()
        log.info(
            "engine_ready",
            model=host.key[0],
            version=host.key[1],
            engine=loaded.name,
            seconds=loaded.seconds,
            memory_bytes=loaded.memory.main_bytes,
            device_memory_bytes=loaded.memory.device_bytes,
        )

    def engine_stepped(self, host: Host, step: RunStep) -> None:
        now_ms = self.clock()
        with self.changed:
            state = self.engines.by_key[host.key]
            state.progressed(now_ms)
            run = self.engines.runs.get(step.run_id)
            if run is None:
                return
            texts: list[StreamedText] = []
            for text in step.texts:
                if text.index in run.open:
                    texts += self._streamed(run, text.index, text.delta, now_ms)
            settled: list[Settled] = []
            for finished in step.finished:
                if run.finish(finished.index, finished.outcome):
                    settled.extend(self._judge(run, state, finished.index, finished.outcome, now_ms))
                    texts += self._ended_stream(run, finished.index)
            self._measure_busy(state, now_ms)
            if step.finished:
                if not run.open and not state.is_continuous and not run.is_copies:
                    # The next run is sent before the answers are encoded, and before the end of this one is reported.
                    self._last_run_at_ms, self._last_run_items = now_ms, len(run.work)
                self.changed.notify_all()
            self._telling += 1
        self.chunks.write(texts)
        self._tell(settled)

    def engine_ended(self, host: Host, ended: RunEnded) -> None:
        """A run is over; what it left without an outcome runs again, or has failed."""
        now_ms = self.clock()
        with self.changed:
            run = self.engines.runs.end(ended.run_id)
            if run is None:
                return
            state = self.engines.by_key[host.key]
            self.engines.ended(host.key)
            engine_run = _run_of(state, run, now_ms)
            self._leave_streams(run, engine_run)
            problem = ended.problem or (Problem("MissingOutcome") if run.open else None)
            self._measure(run, state, ended, problem, now_ms)
            verdict = Verdict()
            if problem is not None and run.open:
                alone = run.is_by_itself(continuous=state.is_continuous)
                verdict = after_problem(run.open_work, problem, now_ms, self.chance(), alone=alone)
                log.warning(
                    "engine_failed",
                    model=host.key[0],
                    engine=state.name,
                    error=problem.error,
                    items=len(run.work),
                    again=sum(len(again.work) for again in verdict.again),
                )
                metrics.RETRIES.labels(model=host.key[0], reason=_reason(problem)).inc(len(verdict.again))
            settled = self._apply(verdict, engine_run)
            self._telling += 1
            self.changed.notify_all()
        self._tell(settled)

    def engine_died(self, host: Host, end: EngineEnd) -> None:
        """Handle the end of an engine's process: items without an outcome run again, or are counted as its cause."""
        now_ms = self.clock()
        with self.changed:
            state = self.engines.by_key[host.key]
            state.is_loaded, state.watch = False, None
            runs = self.engines.runs.end_all(host.key)
            for run in runs:
                self._leave_streams(run, _run_of(state, run, now_ms))
            unfinished = [run for run in runs if run.open]
            lost = [work for run in unfinished for work in run.open_work]
            alone = len(unfinished) == 1 and unfinished[0].is_by_itself(continuous=state.is_continuous)
            verdict = after_death(lost, end, alone=alone)
            settled = []
            if runs:
                if not all(run.is_copies for run in runs):
                    self.meter.finished(1.0, failed=True)
                    self._last_run_at_ms = now_ms
                started_at_ms = min(run.started_at_ms for run in runs)
                settled = self._apply(verdict, EngineRun(state.name, len(lost), started_at_ms, now_ms))
            self._measure_busy(state, now_ms)
            self._telling += 1
            self.changed.notify_all()
        metrics.ENGINE_RESTARTS.labels(model=host.key[0], end=end.kind).inc()
        metrics.RETRIES.labels(model=host.key[0], reason="engine_died").inc(len(verdict.again))
        log.error(
            "engine_lost",
            model=host.key[0],
            engine=state.name,
            reason=end.reason,
            kind=end.kind,
            request_ids=[work.request_id for work in lost],
        )
        self._tell(settled)

    def engine_failed(self, host: Host, failure: LoadFailed) -> None:
        """The end of the consumer if it has served requests with the version. It serves on without one that cannot be
        loaded, or that ran copies alone."""
        log.error("engine_unusable", model=host.key[0], version=host.key[1], reason=failure.message)
        with self.changed:
            state = self.engines.by_key[host.key]
            state.failure = failure
            has_served = state.has_run_requests and not state.is_hidden
        if has_served:
            self.on_fatal(EngineFailedError(failure.message))

    def _tell(self, settled: Sequence[Settled]) -> None:
        self.submit(settled)
        self.guardrails.pump()
        with self.changed:
            self._telling -= 1

    def _start(self) -> tuple[ActiveRun, EngineState] | None:
        if self._has_too_much_uncommitted():
            return None
        now_ms = self.clock()
        picked = self.waiting.pick(now_ms, self.engines, idle=self._is_idle(now_ms))
        if picked is None:
            return None
        state = self.engines.by_key[picked.model_key]
        self.engines.about_to_start(picked.model_key)
        run = self.engines.runs.start(picked.model_key, picked.work, now_ms, alone=picked.alone)
        state.has_run_copies |= run.is_copies
        state.has_run_requests |= not run.is_copies
        state.started(now_ms, self.timeouts, self.meter.predicted_s(len(picked.work), picked.cost_tokens))
        self._measure_busy(state, now_ms)
        return run, state

    def _yielding(self) -> list[tuple[Host, int, tuple[int, ...]]]:
        """Copies that are to end at their next step: host, run and items. Under the lock."""
        yielding = self.engines.copies_in_the_way(self.waiting.requests)
        for run in yielding:
            run.is_yielding = True
        return [(self.engines.by_key[run.model_key].host, run.run_id, tuple(sorted(run.open))) for run in yielding]

    @staticmethod
    def _end_copies(yielding: Sequence[tuple[Host, int, tuple[int, ...]]]) -> None:
        for host, run_id, indexes in yielding:
            host.cancel(run_id, indexes)

    def _send(self, run: ActiveRun, state: EngineState) -> None:
        state.host.run(run.run_id, engine_items(run.work, self.clock()), state.life)
        # A cancel that came since the run was picked may have been sent before it, to nobody.
        unwanted = tuple(index for index, work in enumerate(run.work) if self.is_cancelled(work))
        if unwanted:
            state.host.cancel(run.run_id, unwanted)

    def _pause_s(self) -> float | None:
        """Seconds until something can be due; None: until something changes."""
        if self._has_too_much_uncommitted():
            return _ROOM_RECHECK_S
        now_ms = self.clock()
        due_at_ms = self.waiting.due_at_ms(self.engines, idle=self._is_idle(now_ms))
        return None if due_at_ms is None else max(0.001, (due_at_ms - now_ms) / 1000)

    def _rests(self) -> bool:
        return not self.engines.runs and not self._telling and not self.guardrails.answer_count

    def _has_too_much_uncommitted(self) -> bool:
        """Checks of answers and commits overlap the next batch, but only so many may be outstanding."""
        outstanding = self.transactions.pending_count + self.guardrails.answer_count
        return outstanding > _MAX_UNCOMMITTED_BATCHES * self.waiting.batcher.limits.max_items

    def _is_idle(self, now_ms: int) -> bool:
        """Whether waiting for a larger batch is useless: the engine was idle, or its last run was a single item. Runs
        of copies do not count."""
        rested = now_ms - self._last_run_at_ms > self.waiting.batcher.limits.timeout_ms
        return rested or (self._last_run_items <= 1 and self.waiting.requests <= 1)

    def _streamed(self, run: ActiveRun, index: int, delta: str, now_ms: int) -> list[StreamedText]:
        work, model = run.work[index], run.model_key[0]
        since_last_ms = run.text_came(index, now_ms)
        if since_last_ms is None:
            metrics.FIRST_TOKEN_SECONDS.labels(model=model).observe((now_ms - work.received_at_ms) / 1_000)
        else:
            metrics.INTER_TOKEN_SECONDS.labels(model=model).observe(since_last_ms / 1_000)
        policy = work.item.guardrails
        if policy is not None and concerns_answers(policy):
            self.guardrails.text((run.run_id, index), work, delta)
            return []
        return [StreamedText(work, run.next_chunk(index), delta)]

    def _ended_stream(self, run: ActiveRun, index: int) -> list[StreamedText]:
        """The end of an item's stream; that of an answer in its checks comes with the answer."""
        work = run.work[index]
        if run.has_streamed(index):
            return [StreamedText(work, run.next_chunk(index), "", last=True)]
        return [] if work.item.guardrails is None else self.guardrails.leave((run.run_id, index), work)

    def _leave_streams(self, run: ActiveRun, engine_run: EngineRun) -> None:
        """A run ended before some of its items did: what was refused does not run again, other streams begin anew."""
        for index in sorted(run.open):
            work, key, gone = run.work[index], (run.run_id, index), CancelledItem(TokenUsage())
            if work.item.guardrails is None:
                continue
            if self.guardrails.is_refused(key):
                run.finish(index, gone)
                self.guardrails.takes(key, work, gone, engine_run)
            else:
                self.guardrails.leave(key, work)

    def _judge(
        self, run: ActiveRun, state: EngineState, index: int, outcome: ItemOutcome, now_ms: int
    ) -> list[Settled]:
        work = run.work[index]
        engine_run = _run_of(state, run, now_ms)
        if run.is_yielding and isinstance(outcome, CancelledItem) and not self.is_cancelled(work):
            # What moved on is left to its new owner.
            if self.is_current(work.claim):
                if run.alone:
                    self.waiting.add_again((Again((work,), alone=True),))
                else:
                    self.waiting.add(work)
            return []
        if state.is_continuous and isinstance(outcome, Success) and not work.is_copy:
            self._busy.served(work.item, outcome.usage)
        if work.item.guardrails is not None and self.guardrails.takes((run.run_id, index), work, outcome, engine_run):
            return []
        if not isinstance(outcome, Failure):
            return [Settled(work, outcome, engine_run)]
        verdict = after_failure(work, outcome, now_ms, self.chance())
        reason = "transient" if outcome.transient else "less_context"
        metrics.RETRIES.labels(model=run.model_key[0], reason=reason).inc(len(verdict.again))
        return self._apply(verdict, engine_run)

    def _apply(self, verdict: Verdict, run: EngineRun) -> list[Settled]:
        self.waiting.add_again(verdict.again)
        settled = [Settled(work, failure, run) for work, failure in verdict.failed]
        if not verdict.again:
            return settled
        # What moved on or was cancelled while it ran does not run again.
        self.waiting.take_again(lambda work: not self.is_current(work.claim))
        unwanted = self.waiting.take_again(self.is_cancelled)
        return [*settled, *(Settled(work, CancelledItem(TokenUsage()), run) for work in unwanted)]

    def _measure(
        self, run: ActiveRun, state: EngineState, ended: RunEnded, problem: Problem | None, now_ms: int
    ) -> None:
        key, items, tokens = run.model_key, len(run.work), run.all_cost_tokens
        batcher = self.waiting.batcher_of(copies=run.is_copies)
        limits = batcher.limits_of(key)
        fill = max(items / limits.max_items, tokens / limits.max_tokens)
        if not run.is_copies:
            # What a candidate does with copies says nothing of how fast, or how well, requests are served here.
            self.meter.finished(fill, failed=run.all_failed(problem is not None))
            self._last_run_at_ms, self._last_run_items = now_ms, items
        if not state.is_continuous:
            if not run.is_copies:
                self.meter.ran(run.measured(ended.seconds))
            if problem is None:
                # An engine that counts nothing is taken to pad.
                padding = ended.computed_tokens - ended.useful_tokens if ended.computed_tokens else None
                # The way to the engine and back is part of what a batch costs: meanwhile the engine does nothing else.
                way_s = (now_ms - run.started_at_ms) / 1_000 - ended.seconds
                took_s = ended.seconds + min(max(way_s, 0.0), _LONGEST_WAY_S)
                batcher.ran(key, items, tokens, took_s, padding_tokens=padding)
        if problem is not None and problem.out_of_memory:
            metrics.OUT_OF_MEMORY.labels(model=key[0]).inc()
            if items > 1:
                batcher.out_of_memory(key, items, tokens)
        self._measure_busy(state, now_ms)
        _count_run(run, fill, ended)

    def _count_busy(self, state: EngineState, now_ms: int) -> None:
        key = state.host.key
        passed_s = self._busy_time.passed_s(key, now_ms, running=bool(self.engines.runs.of(key)))
        metrics.ENGINE_BUSY_SECONDS.labels(model=key[0]).inc(passed_s)

    def _measure_busy(self, state: EngineState, now_ms: int) -> None:
        self._count_busy(state, now_ms)
        items = sum(len(run.open) for run in self.engines.runs.of(state.host.key))
        metrics.RUNNING_ITEMS.labels(model=state.host.key[0]).set(items)
        if state.is_continuous:
            requests = sum(len(run.open) for run in self.engines.runs.of(state.host.key) if not run.is_copies)
            run = self._busy.changed(now_ms, requests)
            if run is not None:
                self.meter.ran(run)


def _run_of(state: EngineState, run: ActiveRun, now_ms: int) -> EngineRun:
    return EngineRun(state.name, len(run.work), run.started_at_ms, now_ms)


def _count_run(run: ActiveRun, fill: float, ended: RunEnded) -> None:
    model = run.model_key[0]
    metrics.BATCH_ITEMS.labels(model=model).observe(len(run.work))
    metrics.BATCH_FILL.labels(model=model).observe(min(1.0, fill))
    metrics.ENGINE_SECONDS.labels(model=model).observe(ended.seconds)
    metrics.COMPUTED_TOKENS.labels(model=model, kind="useful").inc(ended.useful_tokens)
    metrics.COMPUTED_TOKENS.labels(model=model, kind="padding").inc(max(0, ended.computed_tokens - ended.useful_tokens))
    waited_s = metrics.BATCH_WAIT_SECONDS.labels(model=model)
    for work in run.work:
        waited_s.observe((run.started_at_ms - work.received_at_ms) / 1000)


def _reason(problem: Problem) -> str:
    if problem.out_of_memory:
        return "out_of_memory"
    return "transient" if problem.transient else "split"
