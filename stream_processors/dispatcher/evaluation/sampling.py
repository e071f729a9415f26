"""Whether a shadow copies a dispatched request. Pure: request, pressure and ``now`` in, decision out.

The sample is decided by a sticky hash, so that every dispatcher, and a new owner of a partition, samples the same
requests. The bounds decide what of the sample is copied: they hold for all dispatchers together, each of which has an
equal part. What is not copied is counted with its reason.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from fairlane.evaluation_records import EvaluationMark, Shadow
from fairlane.frozen import frozen_dataclass
from fairlane_server.evaluation.copies import EvaluationArm, EvaluationKind, copy_id
from fairlane_server.evaluation.shadows import is_sampled
from stream_processors.dispatcher.queued_request import QueuedRequest

COPIED = "copied"

_BURST_MS = 2_000
"""What a shadow may spend at once after a rest, as time at its rate."""


class SkipReason(StrEnum):
    """Why a sampled request was not copied."""

    NOT_ALLOWED = "not_allowed"
    """Its tenant does not allow evaluation."""
    NOT_LOADED = "not_loaded"
    """No consumer has loaded the candidate, or it is stopped."""
    LOAD = "load"
    """The candidate's pool is behind its target, degrades requests, or has no consumer."""
    CONCURRENCY = "concurrency"
    RATE = "rate"


@frozen_dataclass(frozen=True, slots=True)
class Pressure:
    """The pool of a shadow's candidate. ``is_under_load``: requests wait longer than their target, or are degraded, or
    no consumer is live. ``cost_tokens_per_s`` is that of the whole pool, 0 while it is unknown."""

    is_under_load: bool
    cost_tokens_per_s: float
    dispatchers: int


@frozen_dataclass(frozen=True, slots=True)
class Sampled:
    """A request in a shadow's sample. ``skipped`` says why there is no copy, None if there is one."""

    shadow: Shadow
    mark: EvaluationMark
    skipped: SkipReason | None

    @property
    def result(self) -> str:
        return self.skipped or COPIED


@dataclass(slots=True)
class ShadowBounds:
    """What one shadow has under way from this dispatcher, and its token bucket. The bucket may go below 0 by one copy:
    otherwise a copy that costs more than the burst would never be made."""

    _ends_by_ms: OrderedDict[str, int] = field(default_factory=OrderedDict)
    """By copy, when it has ended at the latest."""
    _tokens: float = 0.0
    _refilled_at_ms: int | None = None

    def judge(self, shadow: Shadow, pressure: Pressure, now_ms: int) -> SkipReason | None:
        """None if the bounds allow one more copy now."""
        self._expire(now_ms)
        self._refill(_tokens_per_ms(shadow, pressure), now_ms)
        if pressure.is_under_load:
            return SkipReason.LOAD
        if len(self._ends_by_ms) >= max(1, shadow.max_concurrent // max(1, pressure.dispatchers)):
            return SkipReason.CONCURRENCY
        return None if self._tokens > 0 else SkipReason.RATE

    def copied(self, copy: str, cost_tokens: int, ends_by_ms: int) -> None:
        """A copy was made; it has ended by then, whatever happens."""
        self._ends_by_ms[copy] = ends_by_ms
        self._tokens -= cost_tokens

    def ended(self, copy: str) -> None:
        self._ends_by_ms.pop(copy, None)

    def _expire(self, now_ms: int) -> None:
        while self._ends_by_ms:
            copy, ends_by_ms = next(iter(self._ends_by_ms.items()))
            if ends_by_ms > now_ms:
                return
            del self._ends_by_ms[copy]

    def _refill(self, per_ms: float, now_ms: int) -> None:
        # A clock that was set back adds nothing.
        since_ms = _BURST_MS if self._refilled_at_ms is None else max(0, now_ms - self._refilled_at_ms)
        self._refilled_at_ms = now_ms
        self._tokens = min(per_ms * _BURST_MS, self._tokens + per_ms * since_ms)


def _tokens_per_ms(shadow: Shadow, pressure: Pressure) -> float:
    rate = shadow.max_share * pressure.cost_tokens_per_s
    if shadow.max_tokens_per_s is not None:
        rate = min(rate, shadow.max_tokens_per_s)
    return rate / max(1, pressure.dispatchers) / 1_000


@dataclass(slots=True)
class ShadowSampler:
    """The shadows of all models at this dispatcher. A model has one at a time. For one thread."""

    _bounds: dict[str, tuple[str, ShadowBounds]] = field(default_factory=dict)
    """By model: the run, and its bounds."""

    def sample(
        self,
        queued: QueuedRequest,
        shadow: Shadow,
        now_ms: int,
        *,
        is_allowed: bool,
        is_loaded: bool,
        pressure: Callable[[], Pressure],
    ) -> Sampled | None:
        """The decision about a request that is dispatched now; None if it is not in the sample. A request that a
        consumer handed back was sampled before.

        Args:
            queued: the request as it is dispatched.
            shadow: that of its model.
            now_ms: the time.
            is_allowed: whether its tenant allows evaluation.
            is_loaded: whether a consumer has loaded the candidate.
            pressure: of the candidate's pool; asked only if it matters.
        """
        if queued.evaluation is not None or queued.handed_back:
            return None
        if not is_sampled(shadow, queued.request, queued.tenant, queued.model.version, queued.arm, now_ms):
            return None
        mark = EvaluationMark(
            *(EvaluationKind.SHADOW, shadow.run, EvaluationArm.CANDIDATE),
            *(queued.tenant, queued.request_id, queued.request.conversation_id),
        )
        if not is_allowed:
            return Sampled(shadow, mark, SkipReason.NOT_ALLOWED)
        if not is_loaded:
            return Sampled(shadow, mark, SkipReason.NOT_LOADED)
        run, bounds = self._bounds.get(queued.model_name, ("", ShadowBounds()))
        if run != shadow.run:
            bounds = ShadowBounds()
            self._bounds[queued.model_name] = shadow.run, bounds
        skipped = bounds.judge(shadow, pressure(), now_ms)
        if skipped is None:
            copy = copy_id(mark.run, mark.arm, mark.tenant, mark.request_id)
            bounds.copied(copy, queued.cost_tokens, now_ms + shadow.max_age_ms)
        return Sampled(shadow, mark, skipped)

    def ended(self, copy: str) -> None:
        """A copy has ended, whichever shadow made it."""
        for _, bounds in self._bounds.values():
            bounds.ended(copy)
