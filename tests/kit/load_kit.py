"""What the fault tests under load share: a slow pool, its load, and the promise held against what was observed."""

from collections.abc import Sequence

from benchmarks.faults.promise import examine
from benchmarks.load import Observed, Offered, Planned, plan
from benchmarks.simulated_pool import SimulatedPool
from benchmarks.trace import TraceSampler, load_trace
from fairlane.outcomes import Outcome, Task
from tests.kit.pipeline import Pipeline

POOL = SimulatedPool()
SESSION_TIMEOUT_MS = 3_000
"""As short as the broker allows: a killed dispatcher is replaced sooner."""
ENV = {**POOL.env, "FAIRNESS_POLICY": "drr", "DISPATCHER_SESSION_TIMEOUT_MS": str(SESSION_TIMEOUT_MS)}
NO_ENGINE_TIME = {
    "SIMULATED_PREFILL_TOKENS_PER_S": "1e9",
    "SIMULATED_DECODE_TOKENS_PER_S": "1e9",
    "MAX_BATCH_SIZE": "32",
}
"""Of consumers that answer what is left once enough was seen."""
PATIENCE_MS = 600_000
"""Longer than any test: such a request never comes too late."""


class Load:
    """Plans for a pipeline's tenants, sizes and gaps drawn with one seed."""

    def __init__(self, pipeline: Pipeline, seed: int) -> None:
        self._pipeline = pipeline
        self.sampler = TraceSampler(load_trace(), seed)

    def offered(
        self,
        tenant: str,
        part: float,
        *,
        timeout_ms: int = PATIENCE_MS,
        priority: str = "normal",
        backfill: bool = False,
    ) -> Offered:
        """What a tenant, given by its short name, sends: a part of the pool's capacity."""
        rate = part * POOL.requests_per_s(self.sampler.mean_cost_tokens)
        return Offered(self._pipeline.tenant(tenant), rate, timeout_ms=timeout_ms, priority=priority, backfill=backfill)

    def plan(self, offered: Sequence[Offered], seconds: float) -> list[Planned]:
        """The records of so many seconds."""
        return plan(offered, seconds, self.sampler, model=self._pipeline.model_for(Task.GENERATE))


def check_promise(pipeline: Pipeline, observed: Sequence[Observed], served: Sequence[str] = ()) -> None:
    """Every request has one reply, what was served was dispatched and metered once, and nothing is left undone.

    ``served`` are ids of requests that were sent beside the load.
    """
    expected = {one.request_id: one.outcome or str(Outcome.OK) for one in observed}
    expected |= dict.fromkeys(served, str(Outcome.OK))
    findings = examine(pipeline.deployment, expected, postgres_dsn=None, timeout_s=0)
    assert findings.problems == []
