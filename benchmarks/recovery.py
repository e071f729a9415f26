"""recovery: seconds until replies flow again after a SIGKILL and the supervisor's restart.

One dispatcher and one consumer, so that no other member takes over. Requests of three tenants are published all the
time; replies flow again when one published after the kill has been answered for every tenant.
"""

import random
import signal
from collections.abc import Iterator
from itertools import count
from time import monotonic, sleep

from benchmarks.cluster import cluster, wait_until
from benchmarks.load import LoadGenerator, Planned, make_request
from benchmarks.result import Figure, Result
from benchmarks.simulated_pool import consumer, dispatcher
from fairlane.schema_files import default_codec

NAME = "recovery"
AIM_S = 10.0
KILLS = 10
HOW = f"{KILLS} kills on one cluster, the worst of each kind"
_DISPATCHER, _CONSUMER = "dispatcher-1", "consumer-1"
_VICTIMS = {"dispatcher": (_DISPATCHER,), "consumer": (_CONSUMER,), "both": (_DISPATCHER, _CONSUMER)}
_TENANTS = ("acme", "globex", "initech")
_INTERVAL_S = 0.05
_TIMEOUT_S = 60.0


def run(kills: int = KILLS) -> Result:
    """Ten kills in turn of a dispatcher, of a consumer, of both; the worst counts."""
    services = [dispatcher(), consumer(env={"ENGINE": "simulated"})]
    random.seed(20)
    tenant_of: dict[str, str] = {}
    took_s: dict[str, list[float]] = {name: [] for name in _VICTIMS}
    runs = []

    def planned() -> Iterator[Planned]:
        for number in count():
            for tenant in _TENANTS:
                request = make_request()
                tenant_of[request.request_id] = tenant
                yield Planned.of(request, tenant, default_codec(), number * _INTERVAL_S)

    with cluster(services, tenants=_TENANTS) as running, LoadGenerator(running.settings, _TENANTS) as load:

        def wait_for_replies(since_s: float) -> float:
            """Seconds until every tenant has the reply to a request published after this moment."""

            def flow() -> bool:
                answered = (one for one in list(load.replied_at) if load.published_at[one] > since_s)
                return len({tenant_of[one] for one in answered}) == len(_TENANTS)

            wait_until(flow, _TIMEOUT_S, "a reply to every tenant")
            return monotonic() - since_s

        load.start(planned())
        wait_for_replies(monotonic())
        for number in range(kills):
            sleep(random.uniform(0.5, 1.5))  # a random moment, so that the kill hits any phase of the loop
            kind = tuple(_VICTIMS)[number % len(_VICTIMS)]
            killed_at_s = monotonic()
            for victim in _VICTIMS[kind]:
                running.stack.supervisor.kill(victim, signal.SIGKILL)
            took_s[kind].append(wait_for_replies(killed_at_s))
            struck = {name: float(kind in (name, "both")) for name in ("dispatcher", "consumer")}
            runs.append({**struck, "s": took_s[kind][-1]})
    return Result(
        NAME,
        (
            Figure(f"worst of {kills}", max(run["s"] for run in runs), "s", "at most", AIM_S),
            *(Figure(f"worst after a kill of {name}", max(taken), "s") for name, taken in took_s.items() if taken),
        ),
        tuple(runs),
    )
