"""A bound on queued requests or bytes that tenants share by weight. Pure.

The rule is the dynamic threshold of Choudhury & Hahne ("Dynamic Queue Length Thresholds for Shared-Memory Packet
Switches", IEEE/ACM Transactions on Networking 6(2), 1998) on one part of the bound, and a fixed part for each tenant in
the rest. Let B be the bound, Q the amount held by all tenants, q and w the amount held by one tenant and its weight,
w_all the weights of all tenants, G the guaranteed part of B, and s the size of one more request. It is admitted if

1. q + s <= own bound, or q = 0 (a request larger than the bound could otherwise never be served), and
2. q + s <= G x w / w_all                                                  (the tenant's guaranteed part), or
   q = 0 and Q + s <= B                             (with thousands of tenants a guaranteed part is less than one), or
   q + s <= alpha x w x (B - G - Q - s)                                        (the dynamic threshold).

*Why a dynamic threshold.* With G = 0, a tenant alone may hold alpha x w / (1 + alpha x w) of B, so memory is used; as
others come, the free part shrinks, and every threshold with it. Some always stays free: tenants that are all at their
threshold leave B / (1 + alpha x sum of w), and in whatever order they came and went, the free part is at least B times
the product of 1 / (1 + alpha x w) over the n that hold something, less n requests (take the tenant that was admitted
last: the free part without it, divided by 1 + alpha x w, is free with it, or it holds a single request; then the last
but one). With many tenants that product is small. Hence the guaranteed part.

*What it guarantees.* **A request that keeps its tenant within G x w / w_all is never rejected because of what others
hold**, whatever they sent and in whatever order; nor is **one of a tenant without a backlog, while there is any room at
all**. So the total stays below B + G while weights are constant: up to B any request may have filled it; beyond B only
requests within guaranteed parts are admitted, and those sum up to G.

*Backfill* is not counted here. It has a bound of the same size beside this one, divided by the same rule: a tenant's
part of it decides when its partitions pause. Since records fetched by then still come in, no backfill is read at all
while the bound is full.
"""

from dataclasses import dataclass
from math import floor, inf

from fairlane_server.admission_rule import AFTERWARDS_FREE


@dataclass(frozen=True, slots=True)
class SharedBound:
    """One resource as one tenant sees it, in the resource's unit: requests or bytes."""

    bound: float
    held: float
    own_bound: float
    own_held: float
    weight: float
    all_weights: float
    alpha: float
    guaranteed_part: float

    @property
    def guaranteed(self) -> float:
        """The amount the tenant may hold whatever others hold."""
        if self.all_weights <= 0:
            return 0.0
        return self.bound * self.guaranteed_part * min(1.0, self.weight / self.all_weights)

    @property
    def shared(self) -> float:
        """The part of the bound without guarantees."""
        return self.bound * (1 - self.guaranteed_part)

    def most(self, size: float = 0.0) -> float:
        """The most the tenant may hold at present, after a request of ``size``."""
        free = self.shared - self.held - size
        return min(self.own_bound, max(self.guaranteed, self.alpha * self.weight * free))

    def admits(self, size: float) -> bool:
        """Whether a request of ``size`` is admitted."""
        wanted = self.own_held + size
        if wanted <= self.guaranteed and (self.own_held <= 0 or wanted <= self.own_bound):
            # Whatever the total: only requests admitted by another rule can have filled it.
            return True
        return (self.own_held <= 0 and self.held + size <= self.bound) or wanted <= self.most(size)

    def ms_until_admitted(self, size: float, own_drain_ms: float, drain_ms: float) -> float:
        """Time until a request of ``size`` is admitted, if no other comes.

        ``own_drain_ms`` and ``drain_ms``: time to drain all that the tenant holds, and all that all tenants hold. 0 if
        admitted now, infinite if never. Otherwise the time until a tenth of the tenant's bound is free, not only room
        for this request: its next one would be rejected again. Others drain meanwhile, which only raises the bound.
        """
        if self.admits(size):
            return 0.0
        target = floor(min((1 - AFTERWARDS_FREE) * self.most(size), self.most(size) - size))
        if target >= 0 and (self.held + size <= self.bound or target + size <= self.guaranteed):
            return own_drain_ms * (1 - target / self.own_held)
        # It does not fit beside what others hold, even alone: all must drain until it does.
        if size > self.bound:
            return inf
        must_go = self.held - floor(self.bound - size)
        return max(own_drain_ms, drain_ms * must_go / self.held) if must_go > 0 else own_drain_ms
