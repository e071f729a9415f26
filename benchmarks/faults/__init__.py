"""Kill, pause and end processes of a pipeline under load, then check its promises against the log and Postgres.

What the benchmarks and the fault tests share: ``deployed`` says which pipeline, ``traffic`` sends to it, ``rig`` knows
who owns what and strikes, ``plan`` chooses whom and how, ``campaign`` carries a plan out, ``promise`` examines the log
and Postgres afterwards.
"""

import os
import random

SEED_VARIABLE = "FAIRLANE_FAULT_SEED"
SEEDS = 1_000


def fault_seed() -> int:
    """Seed of victims and moments. The variable repeats the choices of a run, but not its exact timing."""
    given = os.environ.get(SEED_VARIABLE)
    return random.SystemRandom().randrange(SEEDS) if given is None else int(given)
