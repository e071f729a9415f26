"""exactly-once: requests lost or answered twice while processes are killed, paused and ended at random.

Two dispatchers, three consumers with simulated engines in child processes, a recorder and three tenants run under a
supervisor that restarts them. Before each fault the broker must report partitions for every member, and work is
outstanding. A paused service resumes when the others have taken over, a paused engine when its consumer has ended it.
The broker is restarted once. At the end the whole log and Postgres are compared with what was published.
"""

import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic

from benchmarks.cluster import cluster
from benchmarks.faults.plan import (
    END,
    KILL,
    PAUSE,
    SEED_VARIABLE,
    Cast,
    Fault,
    FaultTarget,
    count_kinds,
    fault_seed,
    long_plan,
)
from benchmarks.faults.promise import examine
from benchmarks.faults.rig import Deployment, Rig
from benchmarks.faults.traffic import CampaignLoad, Traffic, carry_out
from benchmarks.result import Figure, Result
from benchmarks.simulated_pool import consumer, dispatcher, recorder, simulated_model
from fairlane.outcomes import Task
from fairlane_server.models.models_file import load_models
from fairlane_server.postgres.rights import PostgresRole
from fairlane_server.processes.restarts import RestartPolicy

NAME = "exactly-once"
REQUESTS = 5_000
FAULTS = 30
HOW = f"one run of {REQUESTS:,} requests, {FAULTS} random faults and a restart of the broker"
CAST = Cast(("dispatcher-1", "dispatcher-2"), ("consumer-1", "consumer-2", "consumer-3"), "recorder-1")
LOAD = CampaignLoad(requests=REQUESTS, per_s=15, burst=100, max_delay_s=1.0)
_POOL = "shared"
_TENANTS = ("acme", "globex", "initech")
_RECORD_TIMEOUT_S = 60.0
# What is struck every few seconds must not look like a crash loop.
_RESTARTS = RestartPolicy(max_deaths=8, window_s=30.0, max_delay_s=1.0)
_ENV = {
    "ENGINE": "simulated",
    # About 20 requests a second and consumer: a burst outlasts the time to its blow.
    "SIMULATED_PREFILL_TOKENS_PER_S": "1e9",
    "SIMULATED_DECODE_TOKENS_PER_S": "200",
    "MAX_BATCH_SIZE": "4",
    "ENGINE_HANG_TIMEOUT_S": "4",
    # As short as the broker allows: a dispatcher that is gone is replaced sooner.
    "DISPATCHER_SESSION_TIMEOUT_MS": "3000",
}


def run(plan: Callable[[random.Random, Cast], Sequence[Fault]] | None = None, load: CampaignLoad = LOAD) -> Result:
    """One run; by default of 30 faults and a restart of the broker. FAIRLANE_FAULT_SEED repeats another's choices."""
    seed = fault_seed()
    started_s = monotonic()

    def say(line: str) -> None:
        print(f"  {monotonic() - started_s:6.1f} s  {line}", file=sys.stderr, flush=True)

    say(f"seed {seed}: {SEED_VARIABLE}={seed} makes the same choices again")
    dice = random.Random(seed)
    faults = long_plan(dice, CAST, FAULTS) if plan is None else plan(dice, CAST)
    services = [
        *(dispatcher(number) for number in range(1, len(CAST.dispatchers) + 1)),
        *(consumer(number, pool=_POOL) for number in range(1, len(CAST.consumers) + 1)),
        recorder(CAST.recorder),
    ]
    stack = cluster(
        services,
        parts=("kafka", "redis", "postgres"),
        tenants=_TENANTS,
        models=[
            simulated_model("words", Task.GENERATE, _POOL, max_context_tokens=4_096, max_output_tokens=512),
            simulated_model("vectors", Task.EMBED, _POOL, max_context_tokens=4_096, max_output_tokens=0),
        ],
        env=_ENV,
        policy=_RESTARTS,
    )
    try:
        with stack as running:
            models = load_models(Path(running.env["MODELS_FILE"]))
            deployed = Deployment(running.settings, _TENANTS, models, running.settings.group_prefix)
            rig = Rig(running.stack, deployed, CAST)
            with Traffic(deployed, seed, load.per_s) as traffic:
                outstanding = carry_out(rig, traffic, faults, load, dice, say)
            dsn = running.stack.endpoints.postgres_dsn(PostgresRole.OPERATOR)
            found = examine(deployed, traffic.expected, postgres_dsn=dsn, timeout_s=_RECORD_TIMEOUT_S)
            ended_by_themselves = rig.ended_by_themselves
            for problem in (*found.problems, *rig.badly_ended):
                say(problem)
    except Exception as error:
        error.add_note(f"{SEED_VARIABLE}={seed} makes the same choices again")
        raise
    kinds = count_kinds(CAST, rig.struck)
    by_sign = {sign: sum(count for kind, count in kinds.items() if kind[0] is sign) for sign in (KILL, PAUSE, END)}
    by_target = {target: sum(count for kind, count in kinds.items() if kind[1] is target) for target in FaultTarget}
    run = {
        "seed": float(seed),
        "longest_gap_s": traffic.longest_gap_s(),
        **{f"{sign.name} {target}": float(count) for (sign, target), count in sorted(kinds.items())},
    }
    return Result(
        NAME,
        (
            Figure("requests without a reply", found.lost, "", "at most", 0),
            Figure("requests with more than one", found.twice, "", "at most", 0),
            Figure("rows in Postgres that differ from the reply topics", found.rows, "", "at most", 0),
            Figure("kinds of broken promises in the log", len(found.problems), "", "at most", 0),
            Figure("ends on SIGTERM with another status than 0", len(rig.badly_ended), "", "at most", 0),
            Figure("longest time without a reply", traffic.longest_gap_s(), "s"),
            Figure("requests", found.requests, ""),
            Figure("faults and restarts of the broker", len(outstanding), ""),
            Figure("of these with work outstanding", sum(map(bool, outstanding)), ""),
            *(Figure(f"victims of {sign.name}", count, "") for sign, count in by_sign.items()),
            *(Figure(f"struck: {target}", count, "") for target, count in by_target.items()),
            Figure("services that ended by themselves and came back", ended_by_themselves, ""),
            Figure("seed", seed, ""),
        ),
        (run,),
    )
