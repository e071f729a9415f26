"""What an upstream service pays for importing the SDK."""

import subprocess
import sys

import pytest

HEAVY = (
    "torch",
    "transformers",
    "faust",
    "aiokafka",
    "fastapi",
    "uvicorn",
    "psycopg",
    "sqlalchemy",
    "alembic",
    "redis",
)
SCRIPT = "import sys; {statement}; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"


def top_level_modules_after(statement: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(statement=statement)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import fairlane",
        "import fairlane.client",
        "from fairlane import *",
        "import fairlane; fairlane.Client(tenant='acme', bootstrap_servers='127.0.0.1:1').close()",
        "import fairlane.client.group_member",
    ],
)
def test_nothing_heavy_is_imported(statement: str) -> None:
    modules = top_level_modules_after(statement)
    assert "fairlane" in modules
    assert modules.isdisjoint(HEAVY)


def test_the_package_alone_imports_nothing_at_all() -> None:
    assert top_level_modules_after("import fairlane").isdisjoint(
        {"confluent_kafka", "pydantic", "fastavro", "structlog"}
    )


def test_nothing_is_said_on_stdout_by_using_it() -> None:
    statement = "import fairlane; fairlane.Client(tenant='acme', bootstrap_servers='127.0.0.1:1').close(); sys.exit(0)"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; {statement}"], capture_output=True, text=True, timeout=60, check=True
    )
    assert (done.stdout, done.stderr) == ("", "")


def test_who_asks_postgres_for_no_vectors_needs_no_numpy() -> None:
    assert "numpy" not in top_level_modules_after(
        "import fairlane_server.postgres.pool, fairlane_server.conversations.conversations"
    )
