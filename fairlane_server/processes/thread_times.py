"""Processor time of a process by thread, as a metric. Costs nothing between scrapes. On Linux only."""

import re
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import REGISTRY, Collector

_NUMBER = re.compile(r"([-_]\d+)+( .*)?$")
"""Of a thread of a pool, with what Python adds: ``asyncio_3``, ``Thread-7 (run)``."""


class ThreadTimes(Collector):
    """The kernel's counters of each thread, by the thread's name without its number."""

    def describe(self) -> Iterable[Metric]:
        return (_family(),)

    def collect(self) -> Iterable[Metric]:
        used_s: dict[str, float] = defaultdict(float)
        for thread in threading.enumerate():
            # One that has ended meanwhile has no file.
            with suppress(OSError):
                counters = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text(encoding="ascii")
                used_s[_NUMBER.sub("", thread.name)] += int(counters.split()[0]) / 1e9
        used_s["native"] = max(0.0, time.process_time() - sum(used_s.values()))
        family = _family()
        for name, seconds in used_s.items():
            family.add_metric([name], seconds)
        return (family,)


def _family() -> CounterMetricFamily:
    meaning = "Processor time of the present threads of this name; native: of libraries, and of threads that ended"
    return CounterMetricFamily("fairlane_thread_cpu_seconds", meaning, labels=["thread"])


REGISTRY.register(ThreadTimes())
