"""Counts of a metric with labels."""

from prometheus_client import REGISTRY


def counted(cache: str, result: str) -> float:
    return REGISTRY.get_sample_value("fairlane_cache_lookups_total", {"cache": cache, "result": result}) or 0.0
