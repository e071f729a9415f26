"""Kill, pause and end processes of a pipeline under load, then check its promises against the log and Postgres.

Shared by benchmarks and fault tests: ``deployed`` describes the pipeline, ``traffic`` sends to it, ``rig`` knows the
owners of partitions and strikes, ``plan`` chooses victims, ``campaign`` carries a plan out, ``promise`` checks the log
and Postgres.
"""

import os
import random

SEED_VARIABLE = "FAIRLANE_FAULT_SEED"
SEEDS = 1_000


def fault_seed() -> int:
    """Seed of victims and moments. The variable repeats the choices of a run, but not its exact timing."""
    given = os.environ.get(SEED_VARIABLE)
    return random.SystemRandom().randrange(SEEDS) if given is None else int(given)
