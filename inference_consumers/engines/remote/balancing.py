"""Which endpoint gets the next item. Pure: events and ``now`` in, an endpoint out.

- *Weighted round robin* is the smooth one of nginx (``ngx_http_upstream_get_peer``): every candidate gains its weight,
  the one with the most is chosen and pays the sum of all. Over as many items as the weights add up to, each gets
  exactly its weight.
- *Least outstanding* is nginx's ``least_conn``: the fewest items under way in proportion to the weight; of several,
  round robin as above, so that items one at a time are divided by weight as well.
- *Health* is what Envoy calls outlier detection with consecutive failures: so many items in a row that failed eject an
  endpoint for a time that doubles with each further ejection, with jitter, up to a bound. After it one item is the
  probe: it decides whether the endpoint is back. Checks at an interval eject one that is idle as well, and keep a probe
  from one that is not ready. Unlike Envoy there is no panic mode: with all endpoints ejected nothing is chosen, since
  work is safe in its queue, and a server that comes back gets one probe at first.
- *Rest*: an endpoint that says it is busy gets nothing for a while, and then one item: the others follow when it is
  answered. All that waited at once would be refused again.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from fairlane.backoff import Backoff
from fairlane_server.circuit_breaker import BreakerPolicy, CircuitBreaker
from inference_consumers.engines.remote.endpoints import BalancingPolicy, ModelEndpoint

EJECTION = BreakerPolicy(failures=5, rest=Backoff(first_s=1.0, longest_s=30.0))
FAILED_CHECKS = 2
"""So many checks in a row that fail make an endpoint unreachable, the first one at once; one that succeeds makes it
reachable."""


class AttemptEnd(Enum):
    """How an item's try at an endpoint ended, as far as it concerns the endpoint."""

    ANSWERED = auto()
    """With an answer, or with a refusal that is due to the item."""
    FAILED = auto()
    BUSY = auto()
    """The endpoint asked to be left alone for a while."""
    ABANDONED = auto()
    """The item was cancelled, or its time was over."""


@dataclass(frozen=True, slots=True, eq=False)
class Attempt:
    """An item's place at the endpoint with this index, until its end is reported."""

    index: int


@dataclass(slots=True)
class EndpointState:
    """``credit`` is that of round robin; ``probe`` the item that decides whether an endpoint that was ejected or busy
    is back, and ``was_busy`` says that nothing was answered since. ``attempts`` and ``failures`` count since the
    start."""

    weight: int
    max_concurrent: int
    breaker: CircuitBreaker
    outstanding: int = 0
    credit: int = 0
    rests_until_ms: float = 0.0
    was_busy: bool = False
    failed_checks: int = FAILED_CHECKS - 1
    probe: Attempt | None = None
    attempts: int = 0
    failures: int = 0

    @property
    def is_reachable(self) -> bool:
        return self.failed_checks < FAILED_CHECKS

    @property
    def is_ejected(self) -> bool:
        return self.breaker.is_open or not self.is_reachable


@dataclass(slots=True)
class EndpointBalancer:
    """The endpoints of one version. Times are in milliseconds of one clock; ``chance`` is a random number in [0, 1).

    Every attempt that ``choose`` returns must be reported to ``ended`` once.
    """

    policy: BalancingPolicy
    states: list[EndpointState] = field(default_factory=list)

    @classmethod
    def of(
        cls, endpoints: Sequence[ModelEndpoint], policy: BalancingPolicy, ejection: BreakerPolicy = EJECTION
    ) -> "EndpointBalancer":
        states = [EndpointState(one.weight, one.max_concurrent, CircuitBreaker(ejection)) for one in endpoints]
        return cls(policy, states)

    def choose(self, now_ms: float, without: Collection[int] = ()) -> Attempt | None:
        """Take a place at an endpoint, none of ``without``; None when no endpoint can take an item now."""
        free = [
            (index, state)
            for index, state in enumerate(self.states)
            if index not in without
            and state.is_reachable
            and state.probe is None
            and state.outstanding < state.max_concurrent
            and now_ms >= state.rests_until_ms
        ]
        for index, state in free:
            if state.breaker.is_open and state.breaker.lets_through(now_ms):
                state.probe = self._take(index)
                return state.probe
        candidates = [(index, state) for index, state in free if not state.breaker.is_open]
        if not candidates:
            return None
        if self.policy is BalancingPolicy.LEAST_OUTSTANDING:
            fewest = min(state.outstanding / state.weight for _, state in candidates)
            candidates = [(index, state) for index, state in candidates if state.outstanding / state.weight == fewest]
        for _, state in candidates:
            state.credit += state.weight
        index, chosen = max(candidates, key=lambda candidate: candidate[1].credit)
        chosen.credit -= sum(state.weight for _, state in candidates)
        attempt = self._take(index)
        if chosen.was_busy:
            chosen.probe = attempt
        return attempt

    def is_healthy(self, without: Collection[int] = ()) -> bool:
        """Whether an endpoint, none of ``without``, takes items now or as soon as it has room."""
        return any(index not in without and not state.is_ejected for index, state in enumerate(self.states))

    def began(self, attempt: Attempt) -> None:
        """The first part of an answer came: a probe need not wait for its end."""
        state = self.states[attempt.index]
        if state.probe is attempt:
            state.probe, state.was_busy = None, False
            state.breaker.succeeded()

    def ended(
        self, attempt: Attempt, end: AttemptEnd, now_ms: float, chance: float = 0.0, rest_ms: float = 0.0
    ) -> None:
        """Give the place back. ``rest_ms`` is for what is busy: how long it gets nothing."""
        state = self.states[attempt.index]
        state.outstanding -= 1
        if end is AttemptEnd.FAILED:
            state.failures += 1
        if end is AttemptEnd.BUSY:
            state.rests_until_ms, state.was_busy = max(state.rests_until_ms, now_ms + rest_ms), True
        if state.probe is attempt:
            state.probe = None
            state.was_busy &= end is not AttemptEnd.ANSWERED
        elif state.breaker.is_open:
            # It was sent before the ejection and says nothing about now.
            return
        if end is AttemptEnd.ANSWERED:
            state.breaker.succeeded()
        elif end is AttemptEnd.FAILED:
            state.breaker.failed(now_ms, chance)
        elif state.breaker.is_open:
            state.breaker.abandoned()

    def checked(self, index: int, *, is_ready: bool) -> None:
        """The result of a check. A good one does not end an ejection: a server may be ready and fail on every item."""
        state = self.states[index]
        state.failed_checks = 0 if is_ready else state.failed_checks + 1

    def _take(self, index: int) -> Attempt:
        self.states[index].outstanding += 1
        self.states[index].attempts += 1
        return Attempt(index)
