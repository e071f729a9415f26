"""queue-cost: time and memory of the fair queue per waiting request, beside a bare heap of the same requests.

100,000 requests wait over 1,000 tenants all the time: one leaves, the next arrives. The heap holds the same requests by
deadline and knows nothing of tenants, classes, sums and removals. Time is of the processor: others do not count.
"""

import gc
import tracemalloc
from heapq import heapify, heappop, heappush
from math import inf
from random import Random
from time import thread_time_ns
from typing import get_args

from benchmarks.result import MEDIAN_OF_REPETITIONS, Figure, Result, median_of, repeated
from benchmarks.simulation import SimulatedRequest, claim_of
from stream_processors.dispatcher.scheduling.fair_queue import FairQueue, Policy, make_fair_queue

NAME = "queue-cost"
HOW = MEDIAN_OF_REPETITIONS
AIM_NS = 4_000.0
AIM_BYTES = 1_024.0
WAITING = 100_000
TENANTS = 1_000
TURNS = 100_000
_NOW_MS = 1_700_000_000_000


def requests(count: int, tenants: int, random: Random) -> list[SimulatedRequest]:
    """Requests of random tenants, classes, costs and deadlines."""
    names = [f"tenant-{number}" for number in range(tenants)]
    made = []
    for offset in range(count):
        tenant = random.choice(names)
        prompt_tokens = round(random.lognormvariate(7.0, 1.0)) + 1
        made.append(
            SimulatedRequest(
                claim=claim_of(tenant, offset),
                tenant=tenant,
                priority_class=random.choices(("high", "normal", "low"), (1, 4, 1))[0],
                cost_tokens=prompt_tokens + 2 * random.randint(1, 256),
                prompt_tokens=prompt_tokens,
                size_bytes=4 * prompt_tokens,
                submitted_at_ms=_NOW_MS,
                deadline_at_ms=_NOW_MS + random.randint(30_000, 120_000),
            )
        )
    return made


def run(waiting: int = WAITING, tenants: int = TENANTS, turns: int = TURNS) -> Result:
    """Three repetitions, every policy and the heap in each."""
    policies: tuple[Policy, ...] = get_args(Policy)

    def measure(number: int) -> dict[str, float]:
        made = requests(waiting + turns, tenants, Random(number))
        heap_ns = _heap_ns(made, waiting)
        figures = {"heap_ns": heap_ns}
        for policy in policies:
            nanoseconds = _queue_ns(make_fair_queue(policy), made, waiting)
            figures[f"{policy}_ns"] = nanoseconds
            figures[f"{policy}_ratio"] = nanoseconds / heap_ns
            figures[f"{policy}_bytes"] = _queue_bytes(make_fair_queue(policy), made[:waiting])
        return figures

    runs = repeated(measure)
    figures = [Figure("bare heap: push and pop", median_of(runs, "heap_ns"), "ns")]
    for policy in policies:
        figures += [
            Figure(f"{policy}: push and pop", median_of(runs, f"{policy}_ns"), "ns", "at most", AIM_NS),
            Figure(f"{policy}: divided by a bare heap's", median_of(runs, f"{policy}_ratio"), "ratio"),
            Figure(f"{policy}: memory per request", median_of(runs, f"{policy}_bytes"), "bytes", "at most", AIM_BYTES),
        ]
    return Result(NAME, tuple(figures), runs)


def _heap_ns(made: list[SimulatedRequest], waiting: int) -> float:
    heap = [(request.deadline_at_ms, number, request) for number, request in enumerate(made[:waiting])]
    heapify(heap)
    arriving = made[waiting:]
    gc.collect()
    started = thread_time_ns()
    for number, request in enumerate(arriving, waiting):
        heappop(heap)
        heappush(heap, (request.deadline_at_ms, number, request))
    return (thread_time_ns() - started) / len(arriving)


def _queue_ns(queue: FairQueue[SimulatedRequest], made: list[SimulatedRequest], waiting: int) -> float:
    for request in made[:waiting]:
        queue.push(request)

    arriving = made[waiting:]
    gc.collect()
    started = thread_time_ns()
    for request in arriving:
        queue.pop(inf, lambda waiting: waiting.deadline_at_ms < _NOW_MS)
        queue.push(request)
    spent_ns = thread_time_ns() - started
    assert len(queue) == waiting
    return spent_ns / len(arriving)


def _queue_bytes(queue: FairQueue[SimulatedRequest], made: list[SimulatedRequest]) -> float:
    """Bytes allocated while the requests are queued; they exist already."""
    gc.collect()
    tracemalloc.start()
    for request in made:
        queue.push(request)
    allocated, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return allocated / len(made)
