"""A bound on queued requests or bytes that tenants share by weight. Pure.

The rule is the dynamic threshold of Choudhury & Hahne ("Dynamic Queue Length Thresholds for Shared-Memory Packet
Switches", IEEE/ACM Transactions on Networking 6(2), 1998) on one part of the bound, and a fixed part for each tenant in
the rest. Let B be the bound, Q what all tenants hold, q and w what one tenant holds and its weight, w_all the weights
of all tenants, G the part of B that is guaranteed, and s the size of one more request. It may come in if

1. q + s <= own bound, or q = 0 (a request larger than the bound could otherwise never be served), and
2. q + s <= G x w / w_all                                                  (the tenant's guaranteed part), or
   q = 0 and Q + s <= B                             (with thousands of tenants a guaranteed part is less than one), or
   q + s <= alpha x w x (B - G - Q - s)                                        (the dynamic threshold).

*Why a threshold that moves.* With G = 0, a tenant alone may hold alpha x w / (1 + alpha x w) of B, so memory does not
lie idle; as others come, what is free shrinks, and everyone's threshold with it. Some always stays free: tenants that
all stand at their threshold leave B / (1 + alpha x sum of w), and whatever the order in which they came and went, what
is free is at least B times the product of 1 / (1 + alpha x w) over those n that hold something, less n requests (take
the tenant that came in last: what is free without it, divided by 1 + alpha x w, is free with it, or it holds a single
request; then the last but one). With many tenants that product is small. Hence the guaranteed part.

*What it guarantees.* **A request that keeps its tenant within G x w / w_all is never refused because of what others
hold**, whatever they sent and in whatever order; nor is **one of a tenant that has nothing waiting, while there is any
place at all**. So what waits stays below B + G while weights stand: up to B anything may have filled it; beyond B
nothing but requests within guaranteed parts comes in, and those sum up to G.

*Backfill* is counted in none of these. It has a bound of the same size beside this one, divided by the same rule: what
a tenant may hold of it says when its partitions pause. Since what was fetched by then still comes in, none is read,
whosesoever, while as much as the bound waits.
"""

from dataclasses import dataclass
from math import floor, inf

from fairlane_server.admission_rule import AFTERWARDS_FREE


@dataclass(frozen=True, slots=True)
class SharedBound:
    """One resource, as one tenant sees it. Everything in the resource's own unit, requests or bytes."""

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
        """What the tenant may hold whatever the others do."""
        if self.all_weights <= 0:
            return 0.0
        return self.bound * self.guaranteed_part * min(1.0, self.weight / self.all_weights)

    @property
    def shared(self) -> float:
        """The part of the bound that nobody has for himself."""
        return self.bound * (1 - self.guaranteed_part)

    def most(self, size: float = 0.0) -> float:
        """The most the tenant may hold as things are, once a request of ``size`` came in."""
        free = self.shared - self.held - size
        return min(self.own_bound, max(self.guaranteed, self.alpha * self.weight * free))

    def admits(self, size: float) -> bool:
        """Whether a request of ``size`` may come in."""
        wanted = self.own_held + size
        if wanted <= self.guaranteed and (self.own_held <= 0 or wanted <= self.own_bound):
            # Without a look at the bound: only what came in by another rule can have filled it.
            return True
        return (self.own_held <= 0 and self.held + size <= self.bound) or wanted <= self.most(size)

    def ms_until_admitted(self, size: float, own_drain_ms: float, drain_ms: float) -> float:
        """How long until a request of ``size`` may come in, if nothing else does.

        ``own_drain_ms`` and ``drain_ms`` say how long all that the tenant holds, and all that everybody holds, takes to
        drain. 0 if it may come in now, infinite if it never may. Otherwise the tenant comes back when a tenth of what
        it may hold is free again, not one request later than the first that fits: else it is refused again with its
        next request. Others drain meanwhile, which only raises what it may hold.
        """
        if self.admits(size):
            return 0.0
        target = floor(min((1 - AFTERWARDS_FREE) * self.most(size), self.most(size) - size))
        if target >= 0 and (self.held + size <= self.bound or target + size <= self.guaranteed):
            return own_drain_ms * (1 - target / self.own_held)
        # Even alone it does not fit beside what the others hold: all must drain until it does.
        if size > self.bound:
            return inf
        must_go = self.held - floor(self.bound - size)
        return max(own_drain_ms, drain_ms * must_go / self.held) if must_go > 0 else own_drain_ms
