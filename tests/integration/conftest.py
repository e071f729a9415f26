"""What must be in the environment before a test imports torch."""

import os

# As the engines have it: OpenMP's threads must not spin on cores that the test's servers use as well.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
