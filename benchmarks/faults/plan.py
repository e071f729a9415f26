"""The choice of faults and their victims. Pure but for the seed, which the environment may give."""

import os
import random
import signal
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

SEED_VARIABLE = "FAIRLANE_FAULT_SEED"
SEEDS = 1_000
KILL, PAUSE, END = signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM


class FaultTarget(StrEnum):
    """What is struck."""

    DISPATCHER = "dispatcher"
    CONSUMER = "consumer"
    RECORDER = "recorder"
    ENGINE = "engine"
    BROKER = "broker"


def fault_seed() -> int:
    """Seed of victims and moments. The variable repeats the choices of a run, but not its exact timing."""
    given = os.environ.get(SEED_VARIABLE)
    return random.SystemRandom().randrange(SEEDS) if given is None else int(given)


@dataclass(frozen=True, slots=True)
class Cast:
    """The services of a pipeline by their names; two or more of each that share work."""

    dispatchers: tuple[str, ...]
    consumers: tuple[str, ...]
    recorder: str

    def of(self, target: FaultTarget) -> tuple[str, ...]:
        """Those that a fault of this kind may strike."""
        return {
            FaultTarget.DISPATCHER: self.dispatchers,
            FaultTarget.CONSUMER: self.consumers,
            FaultTarget.ENGINE: self.consumers,
            FaultTarget.RECORDER: (self.recorder,),
            FaultTarget.BROKER: ("kafka",),
        }[target]


@dataclass(frozen=True, slots=True)
class Fault:
    """One blow.

    Attributes:
        sign: SIGKILL; SIGSTOP, until the others took over (of an engine: until its consumer has ended it); SIGTERM.
        target: what is struck.
        victims: whom; all at once. Of an engine the consumer that runs it.
    """

    sign: signal.Signals
    target: FaultTarget
    victims: tuple[str, ...]

    def __str__(self) -> str:
        whom = " and ".join(self.victims)
        return f"{self.sign.name} {f'the engine of {whom}' if self.target is FaultTarget.ENGINE else whom}"


def count_kinds(cast: Cast, faults: Iterable[Fault]) -> Counter[tuple[signal.Signals, FaultTarget]]:
    """How many victims of each kind there were of each signal."""
    return Counter((fault.sign, _kind_of(cast, fault, victim)) for fault in faults for victim in fault.victims)


def _kind_of(cast: Cast, fault: Fault, victim: str) -> FaultTarget:
    if fault.target in (FaultTarget.ENGINE, FaultTarget.BROKER):
        return fault.target
    return next(target for target in SERVICES if victim in cast.of(target))


SERVICES = (FaultTarget.DISPATCHER, FaultTarget.CONSUMER, FaultTarget.RECORDER)
EVERY_KIND = (
    *((sign, target) for target in SERVICES for sign in (KILL, PAUSE, END)),
    # An engine leaves the end of its consumer to the consumer: SIGTERM is nothing to it.
    (KILL, FaultTarget.ENGINE),
    (PAUSE, FaultTarget.ENGINE),
)


def long_plan(dice: random.Random, cast: Cast, faults: int, restarts: int = 1) -> list[Fault]:
    """So many faults in random order, every kind before any comes again and a few in pairs, and restarts of the broker
    between them."""
    pairs = [
        Fault(KILL, FaultTarget.DISPATCHER, tuple(dice.sample(cast.dispatchers, 2))),
        Fault(KILL, FaultTarget.CONSUMER, tuple(dice.sample(cast.consumers, 2))),
        Fault(KILL, FaultTarget.CONSUMER, (dice.choice(cast.dispatchers), dice.choice(cast.consumers))),
        Fault(KILL, FaultTarget.RECORDER, (dice.choice(cast.dispatchers + cast.consumers), cast.recorder)),
    ]
    kinds = [*dice.sample(EVERY_KIND, len(EVERY_KIND)), *dice.choices(EVERY_KIND, k=faults)]
    alone = [Fault(sign, target, (dice.choice(cast.of(target)),)) for sign, target in kinds]
    chosen = [*alone[: len(EVERY_KIND)], *pairs, *alone[len(EVERY_KIND) :]][:faults]
    plan = dice.sample(chosen, len(chosen))
    for _ in range(restarts):
        # Not the first: there must be something to remember.
        plan.insert(
            dice.randint(min(1, len(plan)), len(plan)), Fault(END, FaultTarget.BROKER, cast.of(FaultTarget.BROKER))
        )
    return plan
