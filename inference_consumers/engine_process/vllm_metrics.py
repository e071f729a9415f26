"""Metrics that engines keep themselves (vLLM's, named ``vllm:…``), shown among the consumer's own."""

from collections.abc import Iterable, Sequence

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from fairlane.logs import get_logger
from inference_consumers.engine_process.host import EngineHost

log = get_logger(__name__)


class EngineMetrics(Collector):
    """A collector for the registry of the process. What an engine says that is no metric is logged and left out: it
    must not take the others along."""

    def __init__(self, hosts: Sequence[EngineHost]) -> None:
        self._hosts = tuple(hosts)

    def collect(self) -> Iterable[Metric]:
        """A family that several engines have is shown once, with the samples of all."""
        families: dict[str, Metric] = {}
        for host in self._hosts:
            try:
                found = list(text_string_to_metric_families(host.metrics_text))
            except ValueError as error:
                log.warning("engine_metrics_unreadable", model=host.key[0], error=type(error).__name__)
                continue
            for family in found:
                known = families.setdefault(family.name, family)
                if known is not family:
                    known.samples.extend(family.samples)
        return families.values()

    def describe(self) -> Iterable[Metric]:
        return ()
