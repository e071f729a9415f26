"""HTTP load in a process of its own: one request repeated, as fast as it is answered or at a rate.

``python -m benchmarks.http_load`` reads an order from its standard input and writes its result, both as JSON. The
request is built once, the answer is parsed in C, the loop is uvloop's, because the generator shares two cores with the
server. It takes 60 to 90 µs of processor time for a request. On the same machine aiohttp took 230 to 330 µs, Locust 460
µs with FastHttpUser and 2,400 µs with HttpUser: at the gateway's 1,400 requests a second, Locust would use two thirds
of a core or more than both. Nor does Locust send at a rate that does not depend on the answers. The generator's own
processor time is part of the result (``cpu_us_per_request``).
"""

import asyncio
import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from time import monotonic, process_time

import uvloop

from producers.replay.http_client import HttpClient, HttpError
from producers.replay.report import Histogram

_CALL_TIMEOUT_S = 30.0
_START_AND_END_S = 60.0
_MOST_UNDER_WAY = 5_000
_LEAST_WAIT_S = 0.0005
CONNECTION = "connection"
LEFT_OUT = "left out"


@dataclass(frozen=True, slots=True)
class Order:
    """What to send.

    Attributes:
        connections: concurrent calls, each after the answer to the one before. 0: at ``rate_per_s``.
        rate_per_s: mean rate of calls that start at random moments, whether or not others were answered.
    """

    url: str
    path: str
    headers: Mapping[str, str]
    body: str
    seconds: float
    connections: int = 0
    rate_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class HttpLoadResult:
    """Result of an order.

    Attributes:
        per_s: answers with status 202 a second.
        statuses: answers by status; calls without one, by the reason.
        p50_ms, p99_ms: of those with status 202; at a rate, from when the call was due.
        late_p99_ms: at a rate, how much later than due calls went out.
        cpu_us_per_request: of the generator itself.
    """

    per_s: float
    statuses: dict[str, int]
    p50_ms: float
    p99_ms: float
    late_p99_ms: float
    cpu_us_per_request: float

    @property
    def others(self) -> int:
        """Calls that were not answered with status 202."""
        return sum(count for status, count in self.statuses.items() if status != "202")


def load(order: Order, env: Mapping[str, str] | None = None) -> HttpLoadResult:
    """Run an order in another process, whose environment gets ``env`` too. Raises RuntimeError with its last words when
    it fails."""
    timeout_s = order.seconds + _CALL_TIMEOUT_S + _START_AND_END_S
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.http_load"],
        input=json.dumps(asdict(order)),
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"the load generator failed: {done.stderr[-1_000:]}")
    return HttpLoadResult(**json.loads(done.stdout))


async def carry_out(order: Order) -> HttpLoadResult:
    """Run an order in this process."""
    client = HttpClient(order.url)
    request = client.request("POST", order.path, order.headers, order.body.encode())
    statuses: Counter[str] = Counter()
    took, late = Histogram(), Histogram()
    used_s, started_s = process_time(), monotonic()
    until_s = started_s + order.seconds

    async def call(due_s: float) -> None:
        late.add((monotonic() - due_s) * 1_000)
        try:
            async with asyncio.timeout(_CALL_TIMEOUT_S):
                reply = await client.send(request)
        except (HttpError, TimeoutError):
            statuses[CONNECTION] += 1
            # A server that is gone must not be asked in a tight loop.
            await asyncio.sleep(0.01)
            return
        statuses[str(reply.status)] += 1
        if reply.status == 202:
            took.add((monotonic() - due_s) * 1_000)

    async def repeat() -> None:
        while (now_s := monotonic()) < until_s:
            await call(now_s)

    async with asyncio.TaskGroup() as group:
        if order.connections:
            for _ in range(order.connections):
                group.create_task(repeat())
        else:
            gaps, due_s = random.Random(1), started_s
            under_way: set[asyncio.Task[None]] = set()
            while (due_s := due_s + gaps.expovariate(order.rate_per_s)) < until_s:
                wait_s = due_s - monotonic()
                if wait_s > 0:
                    # Not one wake-up for each call: those of half a millisecond go out together.
                    await asyncio.sleep(max(wait_s, _LEAST_WAIT_S))
                if len(under_way) >= _MOST_UNDER_WAY:
                    statuses[LEFT_OUT] += 1
                    await asyncio.sleep(0)
                    continue
                task = group.create_task(call(due_s))
                under_way.add(task)
                task.add_done_callback(under_way.discard)
    elapsed_s, used_s = monotonic() - started_s, process_time() - used_s
    client.close()
    return HttpLoadResult(
        per_s=statuses["202"] / elapsed_s,
        statuses=dict(statuses),
        p50_ms=took.percentile_ms(0.5) or 0.0,
        p99_ms=took.percentile_ms(0.99) or 0.0,
        late_p99_ms=late.percentile_ms(0.99) or 0.0,
        cpu_us_per_request=used_s * 1e6 / max(1, statuses.total()),
    )


if __name__ == "__main__":
    print(json.dumps(asdict(uvloop.run(carry_out(Order(**json.loads(sys.stdin.read())))))))
