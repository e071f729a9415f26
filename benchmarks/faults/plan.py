"""Whom to strike, and how. Pure: dice in, a plan out."""

import random
import signal
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

KILL, PAUSE, END = signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM


class Target(StrEnum):
    """What is struck."""

    DISPATCHER = "dispatcher"
    CONSUMER = "consumer"
    RECORDER = "recorder"
    ENGINE = "engine"
    BROKER = "broker"


@dataclass(frozen=True, slots=True)
class Cast:
    """The services of a pipeline by their names; two or more of each that share work."""

    dispatchers: tuple[str, ...]
    consumers: tuple[str, ...]
    recorder: str

    def of(self, target: Target) -> tuple[str, ...]:
        """Those that a fault of this kind may strike."""
        match target:
            case Target.DISPATCHER:
                return self.dispatchers
            case Target.CONSUMER | Target.ENGINE:
                return self.consumers
            case Target.RECORDER:
                return (self.recorder,)
            case Target.BROKER:
                return ("kafka",)


@dataclass(frozen=True, slots=True)
class Fault:
    """One blow.

    Attributes:
        sign: SIGKILL; SIGSTOP, until the others took over (of an engine: until its consumer has ended it); SIGTERM.
        target: what is struck.
        victims: whom; all at once. Of an engine the consumer that runs it.
    """

    sign: signal.Signals
    target: Target
    victims: tuple[str, ...]

    def __str__(self) -> str:
        whom = " and ".join(self.victims)
        return f"{self.sign.name} {f'the engine of {whom}' if self.target is Target.ENGINE else whom}"


def count_kinds(cast: Cast, faults: Iterable[Fault]) -> Counter[tuple[signal.Signals, Target]]:
    """How many victims of each kind there were of each signal."""
    return Counter((fault.sign, _kind_of(cast, fault, victim)) for fault in faults for victim in fault.victims)


def _kind_of(cast: Cast, fault: Fault, victim: str) -> Target:
    if fault.target in (Target.ENGINE, Target.BROKER):
        return fault.target
    return next(target for target in SERVICES if victim in cast.of(target))


SERVICES = (Target.DISPATCHER, Target.CONSUMER, Target.RECORDER)
EVERY_KIND = (
    *((sign, target) for target in SERVICES for sign in (KILL, PAUSE, END)),
    # An engine leaves the end of its consumer to the consumer: SIGTERM is nothing to it.
    (KILL, Target.ENGINE),
    (PAUSE, Target.ENGINE),
)


def long_plan(dice: random.Random, cast: Cast, faults: int, restarts: int = 1) -> list[Fault]:
    """So many faults in random order, every kind before any comes again and a few in pairs, and restarts of the broker
    between them."""
    pairs = [
        Fault(KILL, Target.DISPATCHER, tuple(dice.sample(cast.dispatchers, 2))),
        Fault(KILL, Target.CONSUMER, tuple(dice.sample(cast.consumers, 2))),
        Fault(KILL, Target.CONSUMER, (dice.choice(cast.dispatchers), dice.choice(cast.consumers))),
        Fault(KILL, Target.RECORDER, (dice.choice(cast.dispatchers + cast.consumers), cast.recorder)),
    ]
    kinds = [*dice.sample(EVERY_KIND, len(EVERY_KIND)), *dice.choices(EVERY_KIND, k=faults)]
    alone = [Fault(sign, target, (dice.choice(cast.of(target)),)) for sign, target in kinds]
    chosen = [*alone[: len(EVERY_KIND)], *pairs, *alone[len(EVERY_KIND) :]][:faults]
    plan = dice.sample(chosen, len(chosen))
    for _ in range(restarts):
        # Not the first: there must be something to remember.
        plan.insert(dice.randint(min(1, len(plan)), len(plan)), Fault(END, Target.BROKER, cast.of(Target.BROKER)))
    return plan
