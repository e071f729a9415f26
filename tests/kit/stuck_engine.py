"""An engine that is at a run and reports nothing."""

from typing import Any

from fairlane.ownership import Ownership
from fairlane.schema_files import default_codec
from inference_consumers.batching.received_work import ReceivedWork
from inference_consumers.consumer import InferenceConsumer, Prefetch
from inference_consumers.schema_waits import SchemaWaits
from tests.kit.driver_bench import DriverBench, named

STEP_MS = 500


class Idle:
    """A member of a group in which nothing is written."""

    def poll(self, timeout_s: float) -> list[Any]:
        return []

    def pause_priorities(self, full: set[str]) -> None: ...


class Stuck:
    """A consumer whose engine runs a batch until the test lets it go, on a clock that is the test's."""

    def __init__(self) -> None:
        self.bench = DriverBench(max_items=1)
        self.cpu_ms = 0
        self.computes = 1.0
        loop: Any = self.bench.transactions
        codec = default_codec()
        self.consumer = InferenceConsumer(
            codec=codec,
            ownership=Ownership(1_000),
            transactions=loop,
            driver=self.bench.driver,
            prefetch=Prefetch(100, 1_000_000),
            clock=lambda: self.bench.now_ms,
            schema_waits=SchemaWaits(codec),
        )
        self.bench.add(named("running"))
        self.bench.start()

    def add(self, *more: ReceivedWork) -> None:
        self.bench.add(*more)

    def cancel(self, tenant: str, request_id: str) -> None:
        self.consumer.driver.cancellations.add(tenant, request_id, self.bench.now_ms)
        self.consumer.cancel(tenant, request_id)

    def poll_for(self, time_ms: int) -> None:
        for _ in range(time_ms // STEP_MS):
            self.bench.now_ms += STEP_MS
            self.bench.host.cpu_ms = self.cpu_ms = self.cpu_ms + round(self.computes * STEP_MS)
            self.consumer.poll_once(Idle())
