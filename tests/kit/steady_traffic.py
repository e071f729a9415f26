"""A few requests a second of some tenants of a pipeline, while the test does something else."""

import threading
from collections.abc import Sequence
from time import monotonic

from fairlane.records import InferenceReply
from tests.kit.pipeline import Pipeline

_EVERY_S = 0.05
_TIMEOUT_MS = 120_000


class SteadyTraffic:
    """``sent`` has the time of each request by its id, of each tenant."""

    def __init__(self, pipeline: Pipeline, tenants: Sequence[str]) -> None:
        self._pipeline = pipeline
        self.sent: dict[str, dict[str, float]] = {tenant: {} for tenant in tenants}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._send, daemon=True)

    def __enter__(self) -> "SteadyTraffic":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _send(self) -> None:
        while not self._stop.wait(_EVERY_S):
            for tenant, sent in self.sent.items():
                request = self._pipeline.request(timeout_ms=_TIMEOUT_MS)
                self._pipeline.publish(tenant, request)
                sent[request.request_id] = monotonic()

    def replies(self, timeout_s: float) -> dict[str, InferenceReply]:
        """Every reply by its id, each the only one of its request."""
        found: dict[str, InferenceReply] = {}
        for tenant, sent in self.sent.items():
            log = self._pipeline.replies(tenant)
            log.wait(list(sent), timeout_s)
            found.update(log.exactly_once(list(sent)))
        return found
