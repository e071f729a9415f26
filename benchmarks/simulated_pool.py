"""A pool of simulated engines of a declared speed, and the dispatchers before it.

An engine decodes at half the speed of its prefill, so that a batch takes exactly its cost tokens (prompt plus twice the
output) divided by the speed: the pool's capacity is known without measuring it, in the unit that fairness is measured
in. It is slow on purpose. At 40,000 cost tokens a second and the trace's sizes it serves about 76 requests a second,
and ten times that is still little for the broker, one dispatcher and a load generator on two cores; at the speed of a
real GPU fleet this machine would be what is measured. A batch of 4 then takes 105 ms on each of two engines: longer
than the way from its settlement to the next work (some 30 ms), so that the batch that lies ready covers that way.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from deploy.local.services import Service

POOL = "generate"
FairnessPolicy = Literal["drr", "vtc", "fifo"]
_HELD_REQUESTS = 200_000
_HELD_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class SimulatedPool:
    """So many engines that together serve ``cost_tokens_per_s``."""

    cost_tokens_per_s: float = 40_000.0
    consumers: int = 2
    max_batch_size: int = 4

    @property
    def env(self) -> dict[str, str]:
        """The settings of each consumer."""
        speed = self.cost_tokens_per_s / self.consumers
        return {
            "ENGINE": "simulated",
            "SIMULATED_PREFILL_TOKENS_PER_S": str(speed),
            "SIMULATED_DECODE_TOKENS_PER_S": str(speed / 2),
            "MAX_BATCH_SIZE": str(self.max_batch_size),
        }

    def services(self) -> list[Service]:
        """The consumers."""
        return [
            Service(f"consumer-{POOL}-{number}", ("-m", "inference_consumers", "--pool", POOL), self.env)
            for number in range(1, self.consumers + 1)
        ]

    def requests_per_s(self, mean_cost_tokens: float) -> float:
        """How many requests of this mean size it serves."""
        return self.cost_tokens_per_s / mean_cost_tokens


def dispatchers(policy: FairnessPolicy, count: int = 1, env: Mapping[str, str] | None = None) -> list[Service]:
    """Dispatchers under a fairness policy."""
    return [
        Service(
            f"dispatcher-{number}", ("-m", "stream_processors.dispatcher"), {"FAIRNESS_POLICY": policy, **(env or {})}
        )
        for number in range(1, count + 1)
    ]


UNBOUNDED = {"MAX_QUEUE_SIZE": str(_HELD_REQUESTS), "MAX_QUEUE_BYTES": str(_HELD_BYTES)}
"""A dispatcher's bounds where nothing is to be refused."""
UNBOUNDED_TENANT = {"queue": {"max_requests": _HELD_REQUESTS, "max_bytes": _HELD_BYTES}}
"""A tenant's."""
