"""Requests published while a plan of faults is carried out, and the longest time without a reply."""

import random
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from time import monotonic, sleep

from benchmarks.cluster import wait_while
from benchmarks.faults.plan import Fault, FaultTarget
from benchmarks.faults.rig import Deployment, Rig
from benchmarks.load import LoadGenerator, Planned, make_request
from fairlane.outcomes import CacheMode, Outcome, Priority, Task
from fairlane.records import InferenceRequest, Parameters, RequestInput

_TIMEOUT_MS = 3_600_000
"""Longer than any run: a request that expires is answered, but its way ends early."""
_REFUSED_SHARE = 0.05
_EMBED_SHARE = 0.3
"""Two models share each partition, so that work is done out of order: the done sets matter then."""
_CACHED_SHARE = 0.15
"""Few distinct ones, so that many get an earlier answer again."""
_READY_TIMEOUT_S = 120.0
_ANSWER_TIMEOUT_S = 240.0
_REPLIES_AFTER_RESTART = 40
_LEAST_BURST = 10
_UNKNOWN_MODEL = "no-such-model"


class Traffic(LoadGenerator):
    """Publishes a mix of requests of all tenants, at a pace or at once."""

    def __init__(self, deployed: Deployment, seed: int, per_s: float) -> None:
        """``per_s`` is the pace of what ``trickle`` allows."""
        super().__init__(deployed.settings, list(deployed.tenants), deployed.codec)
        self._words, self._vectors = (deployed.model_for(task).model for task in (Task.GENERATE, Task.EMBED))
        self._random = random.Random(seed)
        self._interval_s = 1 / per_s
        self._paced_until_s = 0.0
        self.asked = 0
        """How many requests ``trickle`` and ``burst`` were called for."""
        self.expected: dict[str, str] = {}
        """The outcome that each request must have."""

    def trickle(self, count: int) -> None:
        """Publish so many more at the pace, after those that are being published at it."""
        now_s = monotonic()
        begin_s = max(now_s, self._paced_until_s) + self._interval_s
        self._paced_until_s = begin_s + count * self._interval_s
        self._publish_later(begin_s - now_s + number * self._interval_s for number in range(count))
        self.asked += count

    def burst(self, count: int) -> None:
        """Publish so many more at once."""
        self._publish_later(0.0 for _ in range(count))
        self.asked += count

    def longest_gap_s(self) -> float:
        """The longest time in which requests were outstanding and no reply came."""
        return longest_gap_s(self.published_at, self.replied_at)

    def _publish_later(self, moments_s: Iterator[float]) -> None:
        def planned() -> Iterator[Planned]:
            for at_s in moments_s:
                tenant, request = self._random.choice(self._tenants), self._request()
                ok = request.model != _UNKNOWN_MODEL
                self.expected[request.request_id] = Outcome.OK if ok else Outcome.REJECTED
                yield Planned.of(request, tenant, self.codec, at_s)

        self.start(planned())

    def _request(self) -> InferenceRequest:
        """Mostly text to generate of any length, much to embed, some that may be answered from a cache, a few that the
        dispatcher itself must answer."""
        dice = self._random
        request = make_request(
            request_id=str(uuid.UUID(int=dice.getrandbits(128), version=4)),
            model=self._words,
            input=RequestInput(prompt="what is a watermark?"),
            parameters=Parameters(max_tokens=dice.randint(4, 24)),
            priority=str(dice.choice(list(Priority))),
            timeout_ms=_TIMEOUT_MS,
        )
        chance = dice.random()
        if chance < _REFUSED_SHARE:
            return replace(request, model=_UNKNOWN_MODEL)
        if chance < _REFUSED_SHARE + _EMBED_SHARE:
            texts = RequestInput(texts=("a text",))
            return replace(request, model=self._vectors, task=str(Task.EMBED), input=texts, parameters=Parameters())
        if chance < _REFUSED_SHARE + _EMBED_SHARE + _CACHED_SHARE:
            return replace(request, cache=CacheMode.EXACT, parameters=Parameters(max_tokens=dice.choice((4, 8))))
        return request


def longest_gap_s(published_at: Mapping[str, float], replied_at: Mapping[str, float]) -> float:
    """The longest time in which requests were outstanding and no reply came; times in seconds of one clock."""
    moments = sorted([(at, 1) for at in published_at.values()] + [(at, -1) for at in replied_at.values()])
    outstanding, since, longest = 0, 0.0, 0.0
    for at, change in moments:
        if outstanding > 0 and change < 0:
            longest = max(longest, at - since)
        if change < 0 or outstanding == 0:
            since = at
        outstanding += change
    return longest


@dataclass(frozen=True, slots=True)
class CampaignLoad:
    """Load of a fault run: a burst just before each fault, so that work is in flight, then the rest at a steady rate.

    Attributes:
        max_delay_s: bound of the random time between a burst and its fault.
    """

    requests: int
    per_s: float
    burst: int
    max_delay_s: float


def carry_out(
    rig: Rig,
    traffic: Traffic,
    plan: Sequence[Fault],
    load: CampaignLoad,
    dice: random.Random,
    say: Callable[[str], None],
) -> list[int]:
    """Publish and strike until the plan is carried out, everything is published and answered, and everybody works.

    What is not answered in minutes is said, and left to the examination of the log. Returns how many requests were
    outstanding at each fault.
    """
    share = load.requests // len(plan)
    outstanding = []
    for number, fault in enumerate(plan, 1):
        waited_from = monotonic()
        rig.wait_all_own(_READY_TIMEOUT_S)
        waited_s = monotonic() - waited_from
        traffic.burst(load.burst)
        # A random moment, so that the blow hits any phase of the loops; nothing is waited for.
        sleep(dice.uniform(0.0, load.max_delay_s))
        outstanding.append(_strike(rig, traffic, fault))
        say(
            f"{number:2}/{len(plan)}  {fault}: {outstanding[-1]} outstanding of {traffic.published} "
            f"(partitions for all after {waited_s:.1f} s)"
        )
        traffic.trickle(max(0, min(share * number, load.requests) - traffic.asked))
        rig.see_through(fault, _READY_TIMEOUT_S)
        if fault.target is FaultTarget.BROKER:
            # What it knows of the groups is from before: only replies show that everybody works again.
            traffic.wait_replies(min(_REPLIES_AFTER_RESTART, traffic.outstanding), _READY_TIMEOUT_S)
    traffic.trickle(max(0, load.requests - traffic.asked))
    traffic.wait_published(_ANSWER_TIMEOUT_S)
    with suppress(TimeoutError):
        traffic.wait_answered(_ANSWER_TIMEOUT_S)
    rig.wait_all_own(_READY_TIMEOUT_S)
    say(
        f"{traffic.published - traffic.outstanding} of {traffic.published} are answered, "
        f"longest gap {traffic.longest_gap_s():.1f} s"
    )
    return outstanding


def _strike(rig: Rig, traffic: Traffic, fault: Fault) -> int:
    """As soon as the blow hits; meanwhile see to it that there is work."""

    def prevented() -> str | None:
        if not traffic.outstanding:
            traffic.burst(_LEAST_BURST)
        return rig.strike(fault)

    wait_while(prevented, _READY_TIMEOUT_S, f"everything to be ready for {fault}")
    return traffic.outstanding
