"""Fair queue of one pool and its policies. Pure.

The queue is a tree of shares. Below the root are the classes, below a class its tenants, below a tenant its groups
(if it has any), and at the leaves queues in which the earliest deadline goes first. The children of one node share
its service by their weights, in tokens, by deficit round robin (Shreedhar and Varghese, "Efficient Fair
Queuing Using Deficit Round Robin", IEEE/ACM Transactions on Networking, 1996) in its surplus form (Adiseshu, Parulkar
and Varghese, "A Reliable and Scalable Striping Protocol", SIGCOMM 1996): a child may overdraw its quantum by its last
request and pays in the following rounds. Rounds are not counted down: each child has

    spent   what it was charged, in tokens divided by its weight
    round   floor(spent / Q), Q being the quantum in tokens of a child of weight 1

and the parent serves the backlogged child of the least round, within a round the one that entered it first. So a
child with a debt of a thousand rounds costs no more time than another, and an idle one costs none. A child that becomes
backlogged enters with ``spent = max(spent, level)``, level being Q times the round being served, which never
decreases: idle time earns no credit, and a debt stays. (When the last child leaves, level becomes its ``spent``:
children that come one after another owe each other nothing.)

**The bound.** Let i and j be two children of one node, w their weights, M the largest cost of a request. While a
child is backlogged, R being the round being served,

    R Q <= spent < (R + 1) Q + M / w

The left side: the round being served is the least of all, and a child enters at level >= R Q. The right side: a child
is served only while its round is R, so before its last request spent < (R + 1) Q, and that request added at most M / w;
R only grows; level < (R + 1) Q for a child that enters. Hence at any time -(Q + M / w_j) < spent_i - spent_j < Q + M /
w_i, and over ANY interval in which both are backlogged their service in tokens divided by weight differs by less than
the width of that range:

    | S_i / w_i - S_j / w_j |  <  2 Q + M / w_i + M / w_j

whatever the costs and whatever the others do. It holds on every level: for tenants of a class, groups of a tenant and
the classes themselves, with the weights of that level.

**Changes of weight.** The debt of a child, w (spent - level) tokens, stays the same when its weight changes, so a
weight that goes up and down neither forgives debt nor adds any. (In a fleet the weights of the classes do that all the
time, with the backlogs of other dispatchers; if debt shrank when a weight grows and stayed when it falls, such a class
would keep the pool to itself.) A change ends the interval above. The debt of a child is at most
W Q + M, W being the largest weight it has had: it is served only while it owes less than w Q. So after changes the
range of its spent is (W Q + M) / w instead of Q + M / w, and the bound (W_i Q + M) / w_i + (W_j Q + M) / w_j.

**Corrections.** ``charge`` adds the cost of work beyond its estimate to ``spent``, or refunds the difference. Let E be
the most that is undercharged, and F the most that may still be refunded, of a child's work in flight at any time. A
child is served only while its round is least, so E / w is added to the right side; after a refund only that child is
served until it is level again, so it falls at most F / w below the left side. With corrections counted as service the
bound is 2 Q + (M + E_i + F_i) / w_i + (M + E_j + F_j) / w_j. A refund to an idle child is lost as far as it goes below
level when the child returns.

**The wait of a class.** Let the class l be backlogged, and h be another class. When l is next in turn, h has
at most spent_l + Q + M / w_h, for it was served only while its round was not after that of l; before, at least R Q.
With the right side for l, no more than

    the sum over all other classes h of  w_h (2 Q + M / w_l) + M     tokens

go before the next request of l, at any time, whatever other classes send: for low under 8:3:1 that is 22 Q + 13 M.
(Corrections add F_h + w_h E_l / w_l each.) With changing weights: what l owes lets level rise by (W_l Q + M) / w_l, w_l
being the least weight it has meanwhile; h is served W_h for each such step, and W_h Q + M that it did not owe before.
Together the sum of  W_h (Q + (W_l Q + M) / w_l) + M. ``bounded_wait_tokens`` computes it.

**vtc** is the virtual token counter of Sheng et al. ("Fairness in Serving Large Language Models", OSDI 2024): the
same tree with Q close to 0: the child that has spent least goes next, and one that becomes backlogged is lifted to
the least of the backlogged ones; prompt tokens are charged when a request is popped, output tokens through ``charge``
when they are known (so E above is all output in flight). **fifo** is one queue by arrival over everything.

**Within a leaf's queue** any order keeps the bounds, since no bound above depends on it. ``expedite`` uses that: a
request moves to the head of its own queue, is served when it is that queue's turn, and is charged like any other.
(fifo has one queue for all tenants, and expedites nothing.)

Late requests are removed without a charge. Costs are O(log n): a heap of children per inner node, a heap of requests
per leaf. Changes out of turn (charge, weight, removal) leave outdated entries in a heap, less than half of it.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from typing import Literal, TypeVar

from stream_processors.dispatcher.scheduling.backlog_statistics import (
    DEFAULT_CLASS_WEIGHTS,
    BacklogStatistics,
    Queueable,
    Share,
    checked_class_weights,
)
from stream_processors.dispatcher.scheduling.share_tree import ShareTree

ItemT = TypeVar("ItemT", bound=Queueable)


class ArrivalOrder(BacklogStatistics[ItemT]):
    """One queue for all classes, tenants and groups; weights, costs and deadlines do not matter."""

    def __init__(self) -> None:
        super().__init__(DEFAULT_CLASS_WEIGHTS)
        self._waiting: OrderedDict[Hashable, ItemT] = OrderedDict()

    def push(self, item: ItemT) -> None:
        """Add a request. Raises ValueError for an unknown class and for a claim already queued."""
        sums = self._sums(item.tenant, item.priority_class)
        if self._waiting.setdefault(item.claim, item) is not item:
            raise ValueError(f"waits already: {item.claim}")
        self._add(sums, item)

    def pop(
        self,
        room_tokens: float,
        is_late: Callable[[ItemT], bool],
        is_placed: Callable[[ItemT], bool] | None = None,
    ) -> tuple[ItemT, bool] | None:
        """Remove the first request; returns it and whether it is late. None when empty, when it exceeds the room, or
        when it is not ``is_placed``: nothing overtakes it here."""
        if not self._waiting:
            return None
        item = next(iter(self._waiting.values()))
        late = is_late(item)
        if not late and (item.cost_tokens > room_tokens or (is_placed is not None and not is_placed(item))):
            return None
        self.remove(item, charge=not late)
        return item, late

    def take_late(self, is_late: Callable[[ItemT], bool]) -> list[ItemT]:
        """Remove the late requests. O(n)."""
        gone = [item for item in self._waiting.values() if is_late(item)]
        for item in gone:
            self.remove(item, charge=False)
        return gone

    def remove(self, item: ItemT, *, charge: bool) -> bool:  # noqa: ARG002 - nothing is charged here
        """Remove a request out of turn. False when it is not queued."""
        found = self._waiting.pop(item.claim, None)
        if found is None:
            return False
        if self._subtract(self._sums(found.tenant, found.priority_class), found):
            self.set_share(found.tenant, None)
        return True

    def unblock(self) -> None:
        """Does nothing: no queue is passed over."""

    def expedite(self, item: ItemT) -> bool:  # noqa: ARG002 - no request is
        """Does nothing and returns False: in a queue shared by all tenants it would overtake other tenants."""
        return False

    def charge(self, tenant: str, group: str, priority_class: str, tokens: float) -> None:
        """Does nothing: this policy charges nobody."""

    def debt_tokens(self, tenant: str, priority_class: str) -> float:  # noqa: ARG002 - nobody owes anything
        """Nobody owes anything: 0."""
        return 0.0

    def set_share(self, tenant: str, share: Share | None) -> None:
        """Set the weight, which counts only in ``backlogged_weight``; None: forget it once nothing is queued."""
        self._keep_share(tenant, share)

    def set_class_weights(self, weights: Mapping[str, float]) -> None:
        """Checks the weights, which change nothing. Raises ValueError as the other policies do."""
        checked_class_weights(weights, DEFAULT_CLASS_WEIGHTS)

    def __len__(self) -> int:
        return len(self._waiting)


Policy = Literal["drr", "vtc", "fifo"]

DEFAULT_QUANTUM_TOKENS = 512.0
"""Below the usual cost of a request, so that the bound is nearly all M: turns cost the same whatever the quantum."""

_VTC_QUANTUM_TOKENS = 1e-6
"""So small that a round is the counter itself."""


FairQueue = ShareTree[ItemT] | ArrivalOrder[ItemT]
"""The queued requests of one pool, and their order. For one thread."""


def make_fair_queue(policy: Policy, quantum_tokens: float = DEFAULT_QUANTUM_TOKENS) -> FairQueue[ItemT]:
    """An empty queue. ``quantum_tokens`` (drr only): service of a tenant of weight 1 in a round. Raises ValueError for
    an unknown policy and for a quantum that is not positive."""
    if policy == "drr":
        if quantum_tokens <= 0:
            raise ValueError(f"a quantum must be positive, not {quantum_tokens}")
        return ShareTree(quantum_tokens, charges_output=True)
    if policy == "vtc":
        return ShareTree(_VTC_QUANTUM_TOKENS, charges_output=False)
    if policy == "fifo":
        return ArrivalOrder()
    raise ValueError(f"unknown fairness policy: {policy}")


def service_gap_bound(
    quantum_tokens: float,
    max_cost_tokens: float,
    weight: float,
    other_weight: float,
    largest: float | None = None,
    other_largest: float | None = None,
) -> float:
    """Bound on the difference of the normalized service of two siblings over an interval in which both are backlogged.
    ``largest`` and ``other_largest``: the largest weights they have had, if larger than the present ones."""
    return sum(
        (max(now, before or now) * quantum_tokens + max_cost_tokens) / now
        for now, before in ((weight, largest), (other_weight, other_largest))
    )


def bounded_wait_tokens(
    priority_class: str,
    quantum_tokens: float,
    max_cost_tokens: float,
    weights: Mapping[str, float],
    least_weight: float | None = None,
) -> float:
    """Bound on the tokens of other classes served before the next request of this one, from when it is backlogged.
    ``weights``: the largest that the classes have had; ``least_weight``: the least of this class meanwhile."""
    own = weights[priority_class]
    rise = quantum_tokens + (own * quantum_tokens + max_cost_tokens) / (least_weight or own)
    return sum(weight * rise + max_cost_tokens for name, weight in weights.items() if name != priority_class)
