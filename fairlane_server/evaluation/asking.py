"""Asks a model the examples of a run, through the client of the tenant, and stores the scores as they come.

It may be stopped or killed at any time. Whoever goes on asks what has no score, under the same ids: what was answered
meanwhile is answered again from the log, and runs no second time while dispatchers remember the ids.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Protocol

from fairlane.client.retry_policies import RetryPolicy
from fairlane.errors import Timeout
from fairlane.records import InferenceReply
from fairlane_server.evaluation.evaluation_set import EvaluationExample
from fairlane_server.evaluation.grading import Asked, ExampleScore, Grading, MeasurePlan
from fairlane_server.evaluation.run_store import EvaluationRuns, StoredRun
from fairlane_server.evaluation.stored_runs import request_id_of

AHEAD = 500
"""Most requests that are published and not answered."""
RETRIES = RetryPolicy(tries=100, within_ms=600_000, longest_wait_ms=120_000)
"""Of the requests of an evaluation: what is refused for want of capacity is asked again."""
ONLINE_PATIENCE_S = 900.0
OFFLINE_PATIENCE_S = 15 * 86_400.0
"""Above the longest timeout of a request, behind which it has a reply."""
BACKFILL = "backfill"
"""The priority of runs that wait instead of being shed; no class that a request can name."""

_STORE_S = 2.0
_STORE_MANY = 200
_RENEW_S = 10.0


class ReplyHandle(Protocol):
    """What ``Client.submit`` returns, as far as it is used here."""

    def done(self) -> bool:
        """Whether ``reply`` would return or raise at once."""

    def reply(self, timeout: float | None = None) -> InferenceReply:
        """Raises Timeout."""


Submit = Callable[..., ReplyHandle]
"""``Client.submit``."""


@dataclass(slots=True)
class _Open:
    place: int
    part: str
    handle: ReplyHandle
    submitted_s: float


@dataclass(slots=True)
class RunAsking:
    """One run by one runner. For one thread.

    Attributes:
        runs: of the tenant.
        submit: of the tenant's client.
        run: that this runner has claimed.
        plan: what is asked.
        priority: the class of the requests, or ``BACKFILL`` for a client that publishes offline ones.
        stopping: whether to leave the run to another runner.
        tell: takes how many examples are stored.
        patience_s: how long to wait for a reply.
    """

    runs: EvaluationRuns
    submit: Submit
    run: StoredRun
    runner: str
    plan: MeasurePlan
    priority: str
    stopping: Callable[[], bool]
    tell: Callable[[int], None] = lambda _stored: None
    patience_s: float = ONLINE_PATIENCE_S
    clock: Callable[[], float] = monotonic
    _gradings: dict[int, Grading] = field(default_factory=dict)
    _open: deque[_Open] = field(default_factory=deque)
    _following: deque[tuple[int, Asked]] = field(default_factory=deque)
    _made: dict[int, ExampleScore] = field(default_factory=dict)
    _stored: int = 0
    _stored_s: float = 0.0
    _renewed_s: float = 0.0

    def ask(self, examples: Mapping[int, EvaluationExample]) -> bool:
        """Ask what has no score, and store the scores. Returns whether all have one; False: it was to stop, and
        another runner may go on at once. Raises StoreError, RunTakenError, and what the client raises."""
        done = self.runs.places(self.run.run_id)
        self._stored, self._stored_s, self._renewed_s = len(done), self.clock(), self.clock()
        self.tell(self._stored)
        wanted = self._wanted({place: one for place, one in examples.items() if place not in done})
        try:
            while not self.stopping() and self._publish(wanted):
                self._collect()
            self._store()
        except BaseException:
            # What is stored stays; the rest is asked again. An unknown state of Postgres must not hide the error.
            self._made.clear()
            raise
        if self._gradings or next(wanted, None) is not None:
            self.runs.release(self.run.run_id, self.runner)
            return False
        return True

    def _wanted(self, examples: Mapping[int, EvaluationExample]) -> Iterator[tuple[int, Asked]]:
        for place, example in examples.items():
            grading = Grading(example, self.plan, f"{self.run.run_id}\0{place}")
            self._gradings[place] = grading
            yield from ((place, asked) for asked in grading.first())

    def _publish(self, wanted: Iterator[tuple[int, Asked]]) -> bool:
        """Publish what there is room for. Returns whether anything is awaited."""
        while len(self._open) < AHEAD:
            found = self._following.popleft() if self._following else next(wanted, None)
            if found is None:
                break
            place, asked = found
            fields: dict[str, Any] = {**asked.fields, "request_id": request_id_of(self.run.run_id, place, asked.part)}
            if self.priority != BACKFILL:
                fields["priority"] = self.priority
            handle = self.submit(retries=RETRIES, **fields)
            self._open.append(_Open(place, asked.part, handle, self.clock()))
        return bool(self._open)

    def _collect(self) -> None:
        """Wait for the oldest reply, for a while, and take all that are there."""
        oldest = self._open[0]
        try:
            oldest.handle.reply(_STORE_S)
        except Timeout:
            if self.clock() - oldest.submitted_s > self.patience_s:
                raise
        waiting: deque[_Open] = deque()
        for one in self._open:
            if one.handle.done():
                self._replied(one)
            else:
                waiting.append(one)
        self._open = waiting
        if len(self._made) >= _STORE_MANY or (self._made and self.clock() - self._stored_s >= _STORE_S):
            self._store()
        elif self.clock() - self._renewed_s >= _RENEW_S:
            self.runs.renew(self.run.run_id, self.runner)
            self._renewed_s = self.clock()

    def _replied(self, one: _Open) -> None:
        grading = self._gradings.get(one.place)
        if grading is None:
            # Scored without this reply, since another request of the example failed.
            return
        following = grading.replied(one.part, one.handle.reply(0))
        self._following.extend((one.place, asked) for asked in following)
        if grading.scored is not None:
            self._made[one.place] = grading.scored
            del self._gradings[one.place]

    def _store(self) -> None:
        if self._made:
            self.runs.add(self.run.run_id, self.runner, self._made)
            self._stored += len(self._made)
            self._made.clear()
            self.tell(self._stored)
        self._stored_s = self._renewed_s = self.clock()


def asked_once(
    submit: Submit, requests: Iterable[tuple[int, Asked]], run_id: str, priority: str, patience_s: float
) -> Iterator[tuple[int, InferenceReply]]:
    """Ask single requests, such as those of a calibration, and yield their replies in order; at most ``AHEAD`` are
    under way."""
    waiting: deque[tuple[int, ReplyHandle]] = deque()
    for place, asked in requests:
        fields = {**asked.fields, "request_id": request_id_of(run_id, place, asked.part)}
        if priority != BACKFILL:
            fields["priority"] = priority
        waiting.append((place, submit(retries=RETRIES, **fields)))
        if len(waiting) >= AHEAD:
            first, handle = waiting.popleft()
            yield first, handle.reply(patience_s)
    for place, handle in waiting:
        yield place, handle.reply(patience_s)
