"""Carries a plan of faults out under load."""

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic, sleep

from benchmarks.cluster import wait_while
from benchmarks.faults.plan import Fault, Target
from benchmarks.faults.rig import Rig
from benchmarks.faults.traffic import Traffic

Say = Callable[[str], None]

_READY_TIMEOUT_S = 120.0
_ANSWER_TIMEOUT_S = 240.0
_REPLIES_AFTER_RESTART = 40
_LEAST_BURST = 10


@dataclass(frozen=True, slots=True)
class Load:
    """How a run publishes: a burst just before each blow, so that it hits work, and after it a part at a pace.

    Attributes:
        max_delay_s: bound of the random time between a burst and its blow.
    """

    requests: int
    per_s: float
    burst: int
    max_delay_s: float


@dataclass(frozen=True, slots=True)
class Blow:
    """A fault that happened, and how many requests were outstanding then."""

    fault: Fault
    outstanding: int


def carry_out(
    rig: Rig, traffic: Traffic, plan: Sequence[Fault], load: Load, dice: random.Random, say: Say
) -> list[Blow]:
    """Publish and strike until the plan is carried out, everything is published and answered, and everybody works.

    What is not answered in minutes is said, and left to the examination of the log.
    """
    share = load.requests // len(plan)
    blows = []
    for number, fault in enumerate(plan, 1):
        waited_from = monotonic()
        rig.wait_all_own(_READY_TIMEOUT_S)
        waited_s = monotonic() - waited_from
        traffic.burst(load.burst)
        # A random moment, so that the blow hits any phase of the loops; nothing is waited for.
        sleep(dice.uniform(0.0, load.max_delay_s))
        blows.append(_strike(rig, traffic, fault))
        say(
            f"{number:2}/{len(plan)}  {fault}: {blows[-1].outstanding} outstanding of {traffic.published} "
            f"(partitions for all after {waited_s:.1f} s)"
        )
        traffic.trickle(max(0, min(share * number, load.requests) - traffic.asked))
        rig.see_through(fault, _READY_TIMEOUT_S)
        if fault.target is Target.BROKER:
            # What it knows of the groups is from before: only replies show that everybody works again.
            traffic.wait_replies(min(_REPLIES_AFTER_RESTART, traffic.outstanding), _READY_TIMEOUT_S)
    traffic.trickle(max(0, load.requests - traffic.asked))
    traffic.wait_published(_ANSWER_TIMEOUT_S)
    with suppress(TimeoutError):
        traffic.wait_answered(_ANSWER_TIMEOUT_S)
    rig.wait_all_own(_READY_TIMEOUT_S)
    say(
        f"{traffic.published - traffic.outstanding} of {traffic.published} are answered, "
        f"longest gap {traffic.longest_gap_s():.1f} s"
    )
    return blows


def _strike(rig: Rig, traffic: Traffic, fault: Fault) -> Blow:
    """As soon as the blow hits; meanwhile see to it that there is work."""

    def prevented() -> str | None:
        if not traffic.outstanding:
            traffic.burst(_LEAST_BURST)
        return rig.strike(fault)

    wait_while(prevented, _READY_TIMEOUT_S, f"everything to be ready for {fault}")
    return Blow(fault, traffic.outstanding)
