"""Killing, pausing and ending the processes of a pipeline under load, and holding the promise against what is left.

What the benchmarks and the fault tests share: ``deployed`` says which pipeline, ``traffic`` sends to it, ``rig`` knows
who owns what and strikes, ``plan`` chooses whom and how, ``campaign`` carries a plan out, ``promise`` examines the log
and Postgres afterwards.
"""

import os
import random

SEED_VARIABLE = "FAIRLANE_FAULT_SEED"
SEEDS = 1_000
QUIET = {"log_level": 0}
"""For clients that watch: a broker that is away on purpose is no news."""


def fault_seed() -> int:
    """Decides who is struck and when. The variable repeats a run's choices, though never its exact timing."""
    given = os.environ.get(SEED_VARIABLE)
    return random.SystemRandom().randrange(SEEDS) if given is None else int(given)
