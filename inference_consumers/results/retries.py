"""Retries of failed work. Pure: a failure and ``now`` in, items to retry and to answer out.

A failure is isolated to its item: after a failed batch the engine runs its halves, down to the item that fails alone;
after the death of an engine the batch runs once more, then its items one by one, so that the item that kills engines is
found. A transient failure is retried up to three times within its deadline. An item that was not even tried, because
the servers of its engine were away, is retried until its deadline: an outage must not turn a queue into failures.

An item is poison only by proof: it ran alone, and the engine failed on it, or ended in a way that only the item can
have caused (``engine_process/failures.py``). Failures beside other items, or caused from outside, make it run again and
do not count against it; after ``MAX_ENDS`` ends of all kinds it is given up as tried too often.
"""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field, replace

from fairlane.backoff import Backoff
from fairlane.outcomes import Code, Degradation
from fairlane.records import Message, Passage, WorkItem
from fairlane_server.conversations.turns import newest_half, shortened_use
from inference_consumers.batching.received_work import ModelKey, ReceivedWork
from inference_consumers.engine_process.failures import EngineEnd
from inference_consumers.engines.protocol import Failure, Problem

_MAX_HAND_BACKS = 1
_MAX_UNSERVED = 20
"""More means that dispatchers and consumers disagree on what is loaded: an error, and no update."""


def requeued_item(item: WorkItem, code: Code) -> WorkItem | None:
    """The item to hand back; None when its failure is its answer.

    What was too large for the engine's memory goes back once: its dispatcher tries it again with less context. What is
    still too large then is refused as overloaded. What this consumer has not loaded goes back for one that has, or for
    another version: versions come and go while a pool is updated.
    """
    if code == Code.OVERLOADED and item.handed_back - item.unserved < _MAX_HAND_BACKS:
        return replace(item, handed_back=item.handed_back + 1)
    if code == Code.UNKNOWN_MODEL and item.handed_back < _MAX_UNSERVED:
        return replace(item, handed_back=item.handed_back + 1, unserved=item.handed_back + 1)
    return None


_CONVERSATION = "conversation_id"

MAX_TRIES = 3
"""Of what fails for a reason that may pass."""

_ENDS_TOGETHER = 1
"""How often an item may have been in a process that ended and still run beside others: the first time may be chance."""

LONE_ENDS_OF_POISON = 2
"""How often it must have ended the process by itself to be poison: once may be what an earlier run left behind."""

MAX_ENDS = 5
"""In so many processes an item may have been that ended, however they did: the next would most likely end as well.
Beside others it is in two of them at most, so that an innocent one outlives two ends from outside in any case."""

_BACKOFF = Backoff(first_s=0.1, longest_s=2.0)
_UNTRIED_REST_S = 2.0
"""Before an item that was not tried comes again; shortened at random like a backoff."""


@dataclass(frozen=True, slots=True)
class Again:
    """Work of one model to run together, and apart from other work if ``alone``."""

    work: tuple[ReceivedWork, ...]
    not_before_ms: int = 0
    alone: bool = False

    @property
    def model_key(self) -> ModelKey:
        return self.work[0].model_key


@dataclass(frozen=True, slots=True)
class Verdict:
    """Decision on the items of a failed run."""

    again: tuple[Again, ...] = ()
    failed: tuple[tuple[ReceivedWork, Failure], ...] = ()


def after_problem(
    work: Sequence[ReceivedWork], problem: Problem, now_ms: int, chance: float, *, alone: bool
) -> Verdict:
    """The engine failed on these items, and lives. ``chance`` in [0, 1) spreads the next try; ``alone`` says that there
    is one, and that the engine ran nothing else since that began, not even what has its outcome by now."""
    if problem.transient:
        return _tried(work, f"the engine failed: {problem.error}", now_ms, chance)
    if len(work) > 1:
        middle = len(work) // 2
        return Verdict((Again(tuple(work[:middle])), Again(tuple(work[middle:]))))
    if not alone:
        # A neighbour may be the cause. In a continuous engine only a run that is alone proves it.
        return Verdict((Again(tuple(work), alone=True),))
    if problem.out_of_memory:
        why = f"the engine has not enough memory for this item: {problem.error}"
        return Verdict(failed=((work[0], Failure(Code.OVERLOADED, why)),))
    return _poison(work[0], f"the engine failed on this item alone: {problem.error}")


def after_death(work: Sequence[ReceivedWork], end: EngineEnd, *, alone: bool) -> Verdict:
    """The process of the engine ended while it ran these items. ``alone`` says that there is one, and that the engine
    ran nothing else since that began."""
    proof = int(alone and end.is_own)
    together: list[ReceivedWork] = []
    apart: list[Again] = []
    failed: list[tuple[ReceivedWork, Failure]] = []
    for one in work:
        suspect = replace(one, ends=one.ends + 1, lone_ends=one.lone_ends + proof)
        if suspect.lone_ends >= LONE_ENDS_OF_POISON:
            failed += _poison(suspect, f"the engine's process ends on this item alone: {end.reason}").failed
        elif suspect.ends >= MAX_ENDS:
            why = f"the engine's process ended {suspect.ends} times while it ran, at last: {end.reason}"
            failed.append((suspect, Failure(Code.RETRIES_EXHAUSTED, why)))
        elif suspect.ends > _ENDS_TOGETHER:
            apart.append(Again((suspect,), alone=True))
        else:
            together.append(suspect)
    return Verdict((*((Again(tuple(together)),) if together else ()), *apart), tuple(failed))


def after_failure(work: ReceivedWork, failure: Failure, now_ms: int, chance: float) -> Verdict:
    """An item failed by itself: another try when that may help, or else its answer."""
    if failure.untried:
        return _untried(work, failure.message, now_ms, chance)
    if failure.transient:
        return _tried((work,), failure.message, now_ms, chance)
    item = work.item
    if failure.code == Code.CONTEXT_TOO_LONG and (item.passages or item.history):
        if not work.shortened:
            return Verdict((Again((_with_less_context(work),)),))
        if item.history_use is not None:
            # The estimate was wrong by more than half. A conversation goes on with what it brought itself.
            return Verdict((Again((_without_context(work),)),))
    if failure.field == _CONVERSATION and item.history:
        # A chat template that takes its own request, and not what was said before.
        return Verdict((Again((_without_context(work, passages=item.passages),)),))
    return Verdict(failed=((work, failure),))


def _with_less_context(work: ReceivedWork) -> ReceivedWork:
    """The same with the first half of its passages, which fit best, and the newest half of its history; of either, a
    lone one goes."""
    passages = work.item.passages
    return _shortened(work, passages[: len(passages) // 2], newest_half(work.item.history))


def _without_context(work: ReceivedWork, passages: tuple[Passage, ...] = ()) -> ReceivedWork:
    """The same without its history, and with these passages alone."""
    return _shortened(work, passages, ())


def _shortened(work: ReceivedWork, passages: tuple[Passage, ...], history: tuple[Message, ...]) -> ReceivedWork:
    item = work.item
    steps: list[Degradation] = []
    if passages != item.passages:
        steps.append(Degradation.FEWER_PASSAGES if passages else Degradation.NO_RETRIEVAL)
    if history != item.history:
        steps.append(Degradation.SHORTER_CONTEXT if history else Degradation.NO_HISTORY)
    shorter = replace(
        item,
        passages=passages,
        history=history,
        history_use=shortened_use(item.history_use, item.history, history),
        degradations=(*item.degradations, *(step for step in steps if step not in item.degradations)),
    )
    return replace(work, item=shorter, shortened=True)


def _can_run(again: Again, runnable: Set[ModelKey], idle: Set[ModelKey]) -> bool:
    return again.model_key in (idle if again.alone else runnable)


def _untried(work: ReceivedWork, why: str, now_ms: int, chance: float) -> Verdict:
    next_at_ms = now_ms + int(1_000 * _UNTRIED_REST_S * (1 - _BACKOFF.jitter * chance))
    if next_at_ms >= work.item.deadline_at_ms:
        return Verdict(failed=((work, _too_late(why)),))
    return Verdict((Again((work,), next_at_ms),))


def _tried(work: Sequence[ReceivedWork], why: str, now_ms: int, chance: float) -> Verdict:
    again: list[Again] = []
    failed: list[tuple[ReceivedWork, Failure]] = []
    for one in work:
        tries = one.transient_failures + 1
        next_at_ms = now_ms + int(1_000 * _BACKOFF.delay_s(tries, chance))
        if tries >= MAX_TRIES:
            failed.append((one, Failure(Code.RETRIES_EXHAUSTED, f"{why}; it was tried {tries} times")))
        elif next_at_ms >= one.item.deadline_at_ms:
            failed.append((one, _too_late(why)))
        else:
            again.append(Again((replace(one, transient_failures=tries),), next_at_ms))
    return Verdict(_grouped(again), tuple(failed))


def _too_late(why: str) -> Failure:
    return Failure(Code.RETRIES_EXHAUSTED, f"{why}; its deadline leaves no time for another try")


def _grouped(again: Sequence[Again]) -> tuple[Again, ...]:
    """Those that come again at the same time come together, as they came before; but for their last try, which each has
    to itself: what always fails must not take its neighbours along."""
    last = [one for one in again if one.work[0].transient_failures == MAX_TRIES - 1]
    by_time: dict[int, list[ReceivedWork]] = {}
    for one in again:
        if one not in last:
            by_time.setdefault(one.not_before_ms, []).extend(one.work)
    return (*(Again(tuple(works), at_ms) for at_ms, works in by_time.items()), *last)


def _poison(work: ReceivedWork, why: str) -> Verdict:
    return Verdict(failed=((work, Failure(Code.POISON, why)),))


@dataclass(slots=True)
class PendingRetries:
    """Work to retry, before new work, oldest first. For one thread at a time."""

    _waiting: list[Again] = field(default_factory=list)

    def add(self, again: Sequence[Again]) -> None:
        self._waiting.extend(again)

    def __len__(self) -> int:
        return sum(len(again.work) for again in self._waiting)

    @property
    def cost_tokens(self) -> int:
        return sum(work.item.cost_tokens for again in self._waiting for work in again.work)

    @property
    def waiting_models(self) -> set[ModelKey]:
        """The versions that something waits for."""
        return {again.model_key for again in self._waiting}

    def due_at_ms(self, runnable: Set[ModelKey], idle: Set[ModelKey]) -> int | None:
        """When ``next`` may have something for the same models; None when it will not."""
        return min((again.not_before_ms for again in self._waiting if _can_run(again, runnable, idle)), default=None)

    def waits_alone(self, now_ms: int) -> set[ModelKey]:
        """Models with due work that must run alone: they get no other work until it has run."""
        return {again.model_key for again in self._waiting if again.alone and again.not_before_ms <= now_ms}

    def next(self, now_ms: int, runnable: Set[ModelKey], idle: Set[ModelKey]) -> Again | None:
        """Work to run now, given the models with room and those that are idle."""
        for index, again in enumerate(self._waiting):
            if again.not_before_ms <= now_ms and _can_run(again, runnable, idle):
                return self._waiting.pop(index)
        return None

    def take(self, condition: Callable[[ReceivedWork], bool]) -> list[ReceivedWork]:
        """Remove what meets the condition."""
        taken: list[ReceivedWork] = []
        kept: list[Again] = []
        for again in self._waiting:
            judged = [(work, condition(work)) for work in again.work]
            taken.extend(work for work, matches in judged if matches)
            rest = tuple(work for work, matches in judged if not matches)
            if rest:
                kept.append(replace(again, work=rest))
        self._waiting = kept
        return taken
