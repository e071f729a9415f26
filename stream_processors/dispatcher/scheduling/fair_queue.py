"""Fair queue of one pool: the protocol and the policies. Pure.

The queue is a tree of shares. Below the root stand the classes, below a class its tenants, below a tenant its groups
(if it has any), and at the leaves lines in which the earliest deadline goes first. The children of one node share
what the node gets by their weights, in tokens, by deficit round robin (Shreedhar and Varghese, "Efficient Fair
Queuing Using Deficit Round Robin", IEEE/ACM Transactions on Networking, 1996) in its surplus form (Adiseshu, Parulkar
and Varghese, "A Reliable and Scalable Striping Protocol", SIGCOMM 1996): a child may overdraw its quantum by its last
request and pays in the following rounds. Nothing counts rounds down: each child has

    spent   what it was charged, in tokens divided by its weight
    round   floor(spent / Q), Q being the quantum in tokens of a child of weight 1

and the parent serves the backlogged child of the least round, within a round the one that entered it first. So a
child whose debt is a thousand rounds costs no more than another, and an idle one costs nothing. A child that begins
to wait enters with ``spent = max(spent, level)``, level being Q times the round that is being served, which never
goes back: what was not used while idle is no credit, and a debt stays. (When the last child leaves, level becomes
what that child has spent: those that come one after another owe each other nothing.)

**The bound.** Let i and j be two children of one node, w their weights, M the largest cost of a request. While a
child is backlogged, R being the round that is served,

    R Q <= spent < (R + 1) Q + M / w

The left side: the round that is served is the least of all, and who enters does so at level >= R Q. The right side: a
child is served only while its round is R, so before its last request spent < (R + 1) Q, and that request added at
most M / w; R only grows; level < (R + 1) Q for those who enter. Hence at any time -(Q + M / w_j) < spent_i - spent_j
< Q + M / w_i, and over ANY interval in which both are backlogged their service in tokens divided by weight differs by
less than the width of that range:

    | S_i / w_i - S_j / w_j |  <  2 Q + M / w_i + M / w_j

whatever the costs and whatever the others do. It holds on every level: for tenants of a class, groups of a tenant and
the classes themselves, with the weights of that level.

**Changes of weight.** What a child owes beyond level, w (spent - level) tokens, stays the same when its weight
changes, so a weight that goes up and down neither forgives debt nor adds any. (In a fleet the weights of the classes
do that all the time, with what other dispatchers have waiting; if debt shrank when a weight grows and stayed when it
falls, such a class would keep the pool to itself.) A change ends the interval above. What a child owes is at most
W Q + M, W being the largest weight it has had: it is served only while it owes less than w Q. So after changes the
range of its spent is (W Q + M) / w instead of Q + M / w, and the bound (W_i Q + M) / w_i + (W_j Q + M) / w_j.

**Corrections.** ``charge`` adds to ``spent`` what work cost beyond its estimate, or takes off what it cost less. Let
E be the most that is undercharged, and F the most that may still be refunded, of a child's work in flight at any
time. A child is served only while its round is least, so E / w comes on top of the right side; a refund makes a child
go first until it is level again and for as long nobody else, so that it falls at most F / w below the left side. With
corrections counted as service the bound is 2 Q + (M + E_i + F_i) / w_i + (M + E_j + F_j) / w_j. A refund to a child
that is idle is lost as far as it goes below level when the child returns.

**The wait of a class.** Let the class l have something waiting, and h be another class. When l is next in turn, h has
at most spent_l + Q + M / w_h, for it was served only while its round was not after that of l; before, at least R Q.
With the right side for l, no more than

    the sum over all other classes h of  w_h (2 Q + M / w_l) + M     tokens

go before the next request of l, at any time and whoever floods: for low under 8:3:1 that is 22 Q + 13 M. (Corrections
add F_h + w_h E_l / w_l each.) With changing weights: what l owes lets level rise by (W_l Q + M) / w_l, w_l being the
least weight it has meanwhile; h is served W_h for each such step, and W_h Q + M that it did not owe before. Together
the sum of  W_h (Q + (W_l Q + M) / w_l) + M. ``bounded_wait_tokens`` computes it.

**vtc** is the virtual token counter of Sheng et al. ("Fairness in Serving Large Language Models", OSDI 2024): the
same tree with Q next to 0: always the child that has spent least goes next, and one that begins to wait is lifted to
the least of those that wait; prompt tokens are charged when a request leaves, output tokens through ``charge`` when
they are known (so that E above is all output in flight). **fifo** is one line by arrival over everything.

**Within a line** the order is nobody else's business: nothing above asks for it, so any order keeps the bounds.
``expedite`` uses that: a request goes to the head of its own line, is served when it is that line's turn, and is
charged like any other. (fifo has one line for all tenants, and expedites nobody.)

What is late is removed without a charge. Costs are O(log n): a heap of children per inner node, a heap of requests
per line. Changes out of turn (charge, weight, removal) leave shadows in a heap, less than half of it.
"""

from collections.abc import Callable, Mapping
from typing import Literal, Protocol, TypeVar

from stream_processors.dispatcher.scheduling.arrival_order import ArrivalOrder
from stream_processors.dispatcher.scheduling.backlog_statistics import Backlog, Waiting
from stream_processors.dispatcher.scheduling.share_tree import ShareTree
from stream_processors.dispatcher.scheduling.shares import DEFAULT_CLASS_WEIGHTS, Share

__all__ = [
    "DEFAULT_CLASS_WEIGHTS",
    "DEFAULT_QUANTUM_TOKENS",
    "Backlog",
    "FairQueue",
    "Policy",
    "Share",
    "Waiting",
    "bounded_wait_tokens",
    "make_fair_queue",
    "service_gap_bound",
]

Policy = Literal["drr", "vtc", "fifo"]

DEFAULT_QUANTUM_TOKENS = 512.0
"""Below the usual cost of a request, so that the bound is nearly all M: turns cost the same whatever the quantum."""

_VTC_QUANTUM_TOKENS = 1e-6
"""So little that a round is the counter itself."""

ItemT = TypeVar("ItemT", bound=Waiting)


class FairQueue(Protocol[ItemT]):
    """What waits for one pool, and the order in which it leaves. One thread at a time."""

    def push(self, item: ItemT) -> None:
        """Let it wait. Raises ValueError for a class that is not known and for a claim that waits already."""
        ...

    def pop(self, room_tokens: float, is_late: Callable[[ItemT], bool]) -> tuple[ItemT, bool] | None:
        """The one that goes next, and whether it is late: a late one goes whatever the room and is not charged. None
        when nothing waits, or when the one that goes next costs more than ``room_tokens``: nobody jumps over it."""
        ...

    def take_late(self, is_late: Callable[[ItemT], bool]) -> list[ItemT]:
        """Remove, uncharged, what is late at the head of any line, whoever's turn it is. O(lines), or O(n) for fifo."""
        ...

    def expedite(self, item: ItemT) -> bool:
        """Put this request at the head of its own line (its tenant, group and class), behind those that were put there
        before it; no other line is touched. True when it stands there now, for the first time or not; False when it
        does not wait, and with a policy that has one line for all. O(log n), and O(1) when it stands there already."""
        ...

    def remove(self, item: ItemT, *, charge: bool) -> bool:
        """Take the request with this claim out of turn: ``charge`` if it is dispatched. False when it does not wait."""
        ...

    def charge(self, tenant: str, group: str, priority_class: str, tokens: float) -> None:
        """What work cost beyond what was charged for it; negative: less. Whether anything waits or not."""
        ...

    def set_share(self, tenant: str, share: Share | None) -> None:
        """Set a tenant's weight and groups; None: forget them as soon as nothing of it waits."""
        ...

    def set_class_weights(self, weights: Mapping[str, float]) -> None:
        """Share the pool among the classes in this proportion. A class that is missing or has weight 0 keeps what it
        had. Raises ValueError for a class that is not known and for a weight that is negative or not finite."""
        ...

    def backlogged_weight(self, priority_class: str) -> float:
        """Sum of the weights of the tenants that have something waiting in this class. O(1)."""
        ...

    def waiting(self, tenant: str, priority_class: str) -> Backlog:
        """What waits of this tenant in this class. O(1)."""
        ...

    def waiting_in_class(self, priority_class: str) -> Backlog:
        """What waits in this class. O(1)."""
        ...

    @property
    def total(self) -> Backlog:
        """What waits. O(1)."""
        ...

    def busiest(self, count: int) -> list[tuple[str, int]]:
        """At most so many of the tenants that have something waiting, each with its tokens in all classes together, the
        most first: of every class those that have most. O(n) in the tenants that wait, a comparison each."""
        ...

    def __len__(self) -> int: ...


def make_fair_queue(policy: Policy, quantum_tokens: float = DEFAULT_QUANTUM_TOKENS) -> FairQueue[ItemT]:
    """An empty queue. ``quantum_tokens`` (drr only) is what a tenant of weight 1 gets in a round. Raises ValueError for
    another policy and for a quantum that is not positive."""
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
    """The most by which the normalized service of two siblings differs over an interval in which both wait. ``largest``
    and ``other_largest`` are the largest weights they have had before, if not those."""
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
    """The most tokens of other classes that go before the next request of this one, from when it has one waiting.
    ``weights`` are the largest that the classes have had, ``least_weight`` the least of this one meanwhile."""
    own = weights[priority_class]
    rise = quantum_tokens + (own * quantum_tokens + max_cost_tokens) / (least_weight or own)
    return sum(weight * rise + max_cost_tokens for name, weight in weights.items() if name != priority_class)
