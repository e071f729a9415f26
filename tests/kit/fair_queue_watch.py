"""A fair queue under watch: what each share was served, kept apart from the queue's books, and the bounds it promises.

Written from the promises alone: it knows the tree of shares, but not rounds, levels or heaps.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations
from math import inf

from stream_processors.dispatcher.scheduling.backlog_statistics import DEFAULT_CLASS_WEIGHTS, Share
from stream_processors.dispatcher.scheduling.fair_queue import (
    FairQueue,
    Policy,
    bounded_wait_tokens,
    make_fair_queue,
    service_gap_bound,
)

Path = tuple[str, ...]
"""A share: its class, its tenant, and its groups from the outermost in; "" stands for the requests of no group."""


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A request that waits, and what it will turn out to have cost."""

    claim: int
    tenant: str = "a"
    priority_class: str = "normal"
    cost_tokens: int = 100
    deadline_at_ms: int = 1_000
    group: str = ""
    prompt_tokens: int = 10
    size_bytes: int = 1
    actual_tokens: int = 100
    is_backfill: bool = False


def never(_request: Request) -> bool:
    return False


@dataclass
class _Period:
    """Since two siblings both wait: how far the service of one was ahead of the other's, at most and at least."""

    most: float
    least: float


@dataclass
class Watch:
    """Drives a queue and checks after every step; all state but ``queue`` is the watch's own."""

    policy: Policy
    quantum_tokens: float
    max_cost_tokens: int
    now_ms: int = 0
    shares: dict[str, Share] = field(default_factory=dict)
    class_weights: dict[str, float] = field(default_factory=lambda: dict(DEFAULT_CLASS_WEIGHTS))
    waiting: dict[int, Request] = field(default_factory=dict)
    in_flight: list[Request] = field(default_factory=list)
    left: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.queue: FairQueue[Request] = make_fair_queue(self.policy, self.quantum_tokens)
        self.pushed = 0
        self.spread = 0.0
        """The largest part of its bound that any gap has taken."""
        self._served: defaultdict[Path, float] = defaultdict(float)
        self._periods: dict[tuple[Path, Path], _Period] = {}
        self._undercharged: Counter[Path] = Counter()
        self._refundable: Counter[Path] = Counter()
        self._passed: Counter[str] = Counter()
        """Tokens of other classes that went since this one was served last or began to wait."""
        self._least_weights = dict(self.class_weights)
        """Of the classes since then."""
        self._largest_weights: dict[Path, float] = {(name,): weight for name, weight in self.class_weights.items()}
        self._expedited: dict[int, None] = {}
        """Claims in the order in which they were put first in their lines."""

    def path(self, tenant: str, group: str, priority_class: str) -> Path:
        groups = {each.group: each for each in self.shares.get(tenant, Share()).groups}
        inner: list[str] = []
        at = group if group in groups else ""
        if any((each.parent or "") == at for each in groups.values()):
            inner.append("")
        while at:
            inner.append(at)
            at = groups[at].parent or ""
        return (priority_class, tenant, *reversed(inner))

    def weight(self, share: Path) -> float:
        if len(share) == 1:
            return self.class_weights[share[0]]
        of_tenant = self.shares.get(share[1], Share())
        if len(share) == 2:
            return of_tenant.weight
        return {each.group: each.weight for each in of_tenant.groups}.get(share[-1], 1.0)

    def price(self, request: Request) -> int:
        return request.prompt_tokens if self.policy == "vtc" else request.cost_tokens

    def push(
        self, tenant: str, group: str, priority_class: str, cost: int, actual: int, deadline_in_ms: int
    ) -> Request:
        prompt = min(cost, actual)
        request = Request(
            self.pushed, tenant, priority_class, cost, self.now_ms + deadline_in_ms, group, prompt, cost * 4, actual
        )
        self.pushed += 1
        self.queue.push(request)
        self.waiting[request.claim] = request
        self.check()
        return request

    def pop(self, room_tokens: float = inf) -> Request | None:
        popped = self.queue.pop(room_tokens, self.is_late)
        if popped is None:
            assert not self.waiting or room_tokens < self.max_cost_tokens
            return None
        request, late = popped
        assert not self._jumped(request), "one that was to go earlier in the same line was passed over"
        assert late is self.is_late(request)
        self._leaves(request)
        if not late:
            assert request.cost_tokens <= room_tokens
            self.in_flight.append(request)
            self._serve(request, self.price(request))
            self._count_passed(request)
        self.check()
        return request

    def drop(self, request: Request) -> None:
        assert self.queue.remove(request, charge=False)
        assert not self.queue.remove(request, charge=False)
        self._leaves(request)
        self.check()

    def expedite(self, request: Request) -> None:
        """Whatever this changes within its line, all bounds are checked as if nothing had happened."""
        assert self.queue.expedite(request)
        self._expedited.setdefault(request.claim)
        self.check()

    def settle(self, number: int) -> None:
        request = self.in_flight.pop(number % len(self.in_flight))
        correction = request.actual_tokens - self.price(request)
        self.queue.charge(request.tenant, request.group, request.priority_class, correction)
        self._serve(request, correction)
        self.check()

    def set_share(self, tenant: str, share: Share) -> None:
        self.shares[tenant] = share
        self.queue.set_share(tenant, share)
        for priority_class in self.class_weights:
            for group in ("", *(each.group for each in share.groups)):
                path = self.path(tenant, group, priority_class)
                for depth in range(2, len(path) + 1):
                    self._weigh(path[:depth])
        self._periods = {pair: period for pair, period in self._periods.items() if pair[0][1:2] != (tenant,)}
        self._periods = {pair: period for pair, period in self._periods.items() if pair[1][1:2] != (tenant,)}
        self.check()

    def set_class_weight(self, priority_class: str, weight: float) -> None:
        self.class_weights[priority_class] = weight
        self._weigh((priority_class,))
        self._least_weights[priority_class] = min(weight, self._least_weights[priority_class])
        self.queue.set_class_weights({priority_class: weight})
        self._periods = {pair: period for pair, period in self._periods.items() if len(pair[0]) > 1}
        self.check()

    def _weigh(self, share: Path) -> None:
        self._largest_weights[share] = max(self.weight(share), self._largest_weights.get(share, 1.0))

    def is_late(self, request: Request) -> bool:
        return request.deadline_at_ms < self.now_ms

    def check(self) -> None:
        """Nothing is lost or repeated, the sums are right, and every pair of siblings is within its bound."""
        self._remember_corrections()
        self._check_sums()
        backlogged = {share for request in self.waiting.values() for share in self._shares_of(request)}
        pairs = set(_siblings(backlogged))
        self._periods = {pair: period for pair, period in self._periods.items() if pair in pairs}
        for pair in pairs:
            self._check_gap(*pair)
        self._check_wait(backlogged)

    def _leaves(self, request: Request) -> None:
        assert self.waiting.pop(request.claim) is request
        self.left.append(request.claim)

    def _jumped(self, request: Request) -> list[Request]:
        return [
            other
            for other in self.waiting.values()
            if self._place(other) < self._place(request) and self._shares_of(other) == self._shares_of(request)
        ]

    def _place(self, request: Request) -> tuple[int, int, int]:
        """In its line: those that were expedited, then by deadline, then by arrival."""
        if request.claim in self._expedited:
            return 0, list(self._expedited).index(request.claim), 0
        return 1, request.deadline_at_ms, request.claim

    def _shares_of(self, request: Request) -> list[Path]:
        path = self.path(request.tenant, request.group, request.priority_class)
        return [path[:depth] for depth in range(1, len(path) + 1)]

    def _serve(self, request: Request, tokens: float) -> None:
        for share in self._shares_of(request):
            self._served[share] += tokens / self.weight(share)

    def _remember_corrections(self) -> None:
        under: Counter[Path] = Counter()
        refundable: Counter[Path] = Counter()
        for request in self.in_flight:
            correction = request.actual_tokens - self.price(request)
            for share in self._shares_of(request):
                under[share] += max(0, correction)
                refundable[share] += max(0, -correction)
        self._undercharged |= under
        self._refundable |= refundable

    def _check_gap(self, one: Path, other: Path) -> None:
        ahead = self._served[one] - self._served[other]
        period = self._periods.setdefault((one, other), _Period(ahead, ahead))
        period.most, period.least = max(period.most, ahead), min(period.least, ahead)
        bound = service_gap_bound(
            0.0 if self.policy == "vtc" else self.quantum_tokens,
            self.max_cost_tokens,
            self.weight(one),
            self.weight(other),
            self._largest_weights.get(one),
            self._largest_weights.get(other),
        ) + sum((self._undercharged[each] + self._refundable[each]) / self.weight(each) for each in (one, other))
        self.spread = max(self.spread, (period.most - period.least) / bound)
        assert period.most - period.least <= bound * (1 + 1e-9), f"{one} against {other}"

    def _count_passed(self, request: Request) -> None:
        for name in self.class_weights:
            self._passed[name] += request.cost_tokens
        self._begin_wait(request.priority_class)

    def _begin_wait(self, priority_class: str) -> None:
        self._passed[priority_class] = 0
        self._least_weights[priority_class] = self.class_weights[priority_class]

    def _check_wait(self, backlogged: set[Path]) -> None:
        largest = {name: self._largest_weights[name,] for name in self.class_weights}
        for name, weight in self._least_weights.items():
            if (name,) not in backlogged:
                self._begin_wait(name)
            if self.policy != "drr":
                continue
            corrections = sum(
                self._refundable[(other,)] + largest[other] * self._undercharged[(name,)] / weight
                for other in self.class_weights
                if other != name
            )
            bound = bounded_wait_tokens(name, self.quantum_tokens, self.max_cost_tokens, largest, weight)
            assert self._passed[name] <= (bound + corrections) * (1 + 1e-9)

    def _check_sums(self) -> None:
        queue, waiting = self.queue, list(self.waiting.values())
        assert len(queue) == len(waiting) == queue.total.requests
        assert len(set(self.left)) == len(self.left) == self.pushed - len(waiting)
        assert queue.total.tokens == sum(request.cost_tokens for request in waiting)
        assert queue.total.size_bytes == sum(request.size_bytes for request in waiting)
        tokens_by_tenant: Counter[str] = Counter()
        for request in waiting:
            tokens_by_tenant[request.tenant] += request.cost_tokens
        everybody = queue.busiest(len(waiting))
        assert dict(everybody) == tokens_by_tenant
        assert [tokens for _, tokens in everybody] == sorted(tokens_by_tenant.values(), reverse=True)
        for name in self.class_weights:
            there = [request for request in waiting if request.priority_class == name]
            tenants = {request.tenant for request in there}
            of_class = queue.waiting_in_class(name)
            assert of_class.requests == len(there)
            assert of_class.tokens == sum(request.cost_tokens for request in there)
            expected = sum(self.shares.get(tenant, Share()).weight for tenant in tenants)
            assert abs(queue.backlogged_weight(name) - expected) < 1e-9 * (1 + expected)
            for tenant in tenants:
                own = [request for request in there if request.tenant == tenant]
                backlog = queue.waiting(tenant, name)
                assert backlog.requests == len(own)
                assert backlog.tokens == sum(request.cost_tokens for request in own)
                assert backlog.size_bytes == sum(request.size_bytes for request in own)


def _siblings(shares: set[Path]) -> Iterator[tuple[Path, Path]]:
    for one, other in combinations(sorted(shares), 2):
        if one[:-1] == other[:-1]:
            yield one, other
