"""What must be in the environment before a test imports torch, and the servers that only some tests need."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.own_redis import OwnRedis, own_redis_server

# As the engines have it: OpenMP's threads must not spin on cores that the test's servers use as well.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[OwnRedis]:
    """A Redis that this test alone uses, and may stop."""
    with own_redis_server(tmp_path / "redis") as server:
        yield server
