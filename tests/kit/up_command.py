"""`python -m deploy.local up` as a person runs it."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from deploy.local.layout import PROJECT_ROOT

_PARTS = {"KAFKA_BOOTSTRAP_SERVERS", "POSTGRES_DSN", "POSTGRES_OWNER_DSN", "REDIS_URL"}


@contextmanager
def running(
    data_dir: Path, external: Mapping[str, str] | None = None, *options: str
) -> Iterator[subprocess.Popen[str]]:
    """Parts without services, once they are ready; whatever happens, nothing of them is left.

    Args:
        data_dir: everything is below it.
        external: the variables of parts that are not to be started.
        options: more of `up`'s own.
    """
    environment = {name: value for name, value in os.environ.items() if name not in _PARTS}
    with subprocess.Popen(
        (sys.executable, "-m", "deploy.local", "up", "--bare", "--json", "--data-dir", str(data_dir), *options),
        cwd=PROJECT_ROOT,
        env={**environment, **(external or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert json.loads(process.stdout.readline())["healthy"] is True
            yield process
        finally:
            process.terminate()
            process.communicate(timeout=60)
