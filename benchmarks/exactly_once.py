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
from benchmarks.faults import SEED_VARIABLE, fault_seed
from benchmarks.faults.campaign import Blow, Load, carry_out
from benchmarks.faults.deployed import Deployment
from benchmarks.faults.plan import END, KILL, PAUSE, Cast, Fault, Target, count_kinds, long_plan
from benchmarks.faults.promise import Findings, examine
from benchmarks.faults.rig import Rig
from benchmarks.faults.traffic import Traffic
from benchmarks.result import Figure, Result
from benchmarks.simulated_pool import simulated_model
from deploy.local.services import Service
from fairlane.outcomes import Task
from fairlane_server.models import load_models
from fairlane_server.processes.restarts import RestartPolicy

NAME = "exactly-once"
REQUESTS = 5_000
FAULTS = 30
HOW = f"one run of {REQUESTS:,} requests, {FAULTS} random faults and a restart of the broker"
CAST = Cast(("dispatcher-1", "dispatcher-2"), ("consumer-1", "consumer-2", "consumer-3"), "recorder-1")
LOAD = Load(requests=REQUESTS, per_s=15, burst=100, max_delay_s=1.0)
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

Plan = Callable[[random.Random, Cast], Sequence[Fault]]
Say = Callable[[str], None]


def run(plan: Plan | None = None, load: Load = LOAD) -> Result:
    """One run; by default of 30 faults and a restart of the broker. FAIRLANE_FAULT_SEED repeats another's choices."""
    seed = fault_seed()
    say = _teller()
    say(f"seed {seed}: {SEED_VARIABLE}={seed} makes the same choices again")
    dice = random.Random(seed)
    faults = long_plan(dice, CAST, FAULTS) if plan is None else plan(dice, CAST)
    try:
        return _measure(faults, load, dice, seed, say)
    except Exception as error:
        error.add_note(f"{SEED_VARIABLE}={seed} makes the same choices again")
        raise


def _measure(plan: Sequence[Fault], load: Load, dice: random.Random, seed: int, say: Say) -> Result:
    with cluster(
        _services(),
        parts=("kafka", "redis", "postgres"),
        tenants=_TENANTS,
        models=[
            simulated_model("words", Task.GENERATE, _POOL, max_context_tokens=4_096, max_output_tokens=512),
            simulated_model("vectors", Task.EMBED, _POOL, max_context_tokens=4_096, max_output_tokens=0),
        ],
        env=_ENV,
        policy=_RESTARTS,
    ) as running:
        models = load_models(Path(running.env["MODELS_FILE"]))
        deployed = Deployment(running.settings, _TENANTS, models, running.settings.group_prefix)
        rig = Rig(running.stack, deployed, CAST)
        with Traffic(deployed, seed, load.per_s) as traffic:
            blows = carry_out(rig, traffic, plan, load, dice, say)
        dsn = running.stack.endpoints.postgres_dsn
        findings = examine(deployed, traffic.expected, postgres_dsn=dsn, timeout_s=_RECORD_TIMEOUT_S)
        for problem in (*findings.problems, *rig.badly_ended):
            say(problem)
        return _result(seed, findings, blows, rig, traffic.longest_gap_s())


def _services() -> list[Service]:
    consume = ("-m", "inference_consumers", "--pool", _POOL)
    return [
        *(Service(name, ("-m", "stream_processors.dispatcher")) for name in CAST.dispatchers),
        *(Service(name, consume) for name in CAST.consumers),
        Service(CAST.recorder, ("-m", "stream_processors.recorder")),
    ]


def _result(seed: int, found: Findings, blows: Sequence[Blow], rig: Rig, longest_gap_s: float) -> Result:
    kinds = count_kinds(CAST, [blow.fault for blow in blows])
    by_sign = {sign: sum(count for kind, count in kinds.items() if kind[0] is sign) for sign in (KILL, PAUSE, END)}
    by_target = {target: sum(count for kind, count in kinds.items() if kind[1] is target) for target in Target}
    at_work = sum(blow.outstanding > 0 for blow in blows)
    run = {
        "seed": float(seed),
        "longest_gap_s": longest_gap_s,
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
            Figure("longest time without a reply", longest_gap_s, "s"),
            Figure("requests", found.requests, ""),
            Figure("faults and restarts of the broker", len(blows), ""),
            Figure("of these with work outstanding", at_work, ""),
            *(Figure(f"victims of {sign.name}", count, "") for sign, count in by_sign.items()),
            *(Figure(f"struck: {target}", count, "") for target, count in by_target.items()),
            Figure("services that ended by themselves and came back", rig.ended_by_themselves, ""),
            Figure("seed", seed, ""),
        ),
        (run,),
    )


def _teller() -> Say:
    started = monotonic()

    def say(line: str) -> None:
        print(f"  {monotonic() - started:6.1f} s  {line}", file=sys.stderr, flush=True)

    return say
