"""What `make up` prints, run as it stands, and `make up` a second time."""

import json
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.local.layout import PROJECT_ROOT
from tests.kit.local_stack import running, up, user_environment

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("up")


@pytest.fixture(scope="module")
def screen(data_dir: Path) -> Iterator[str]:
    with running(data_dir) as text:
        yield text


def block(screen: str, first_word: str) -> str:
    """The indented block that begins with this word."""
    found = re.search(rf"^  {first_word}\b.*?(?=\n\S|\n\n|\Z)", screen, re.MULTILINE | re.DOTALL)
    assert found is not None, screen
    return "\n".join(line.removeprefix("  ") for line in found[0].splitlines())


def test_the_curl_command_runs_as_it_is_printed(screen: str) -> None:
    done = subprocess.run(
        ("/bin/sh", "-c", block(screen, "curl")),
        cwd=PROJECT_ROOT,
        capture_output=True,
        text=True,
        timeout=90,
        check=True,
    )
    assert json.loads(done.stdout)["choices"][0]["message"]["content"]


def test_the_python_example_runs_as_it_is_printed(screen: str) -> None:
    code = block(screen, "from")
    assert run(f'{login(screen, "acme")}; exec "$0" -c "$1"', sys.executable, code).strip()


def test_the_environment_of_an_operator_is_enough_for_the_command_line(screen: str, data_dir: Path) -> None:
    assert stat.S_IMODE((data_dir / "env" / "operator.env").stat().st_mode) == 0o600
    fairlane = f'{login(screen, "operator")}; exec "$0" -m fairlane_server.cli'
    assert json.loads(run(f"{fairlane} top --once --json", sys.executable))["dispatchers"] == 1
    assert run(f"{fairlane} keys create --tenant acme --name first", sys.executable).startswith("fl_")


def test_a_tenant_can_neither_read_nor_write_what_is_anothers(screen: str) -> None:
    code = """
from fairlane import Client
with Client("globex") as client:
    client.submit(model="smollm2-135m-instruct", prompt="hello").result(30)
"""
    with pytest.raises(subprocess.CalledProcessError) as refused:
        run(f'{login(screen, "acme")}; exec "$0" -c "$1"', sys.executable, code)
    assert "replies.globex: Broker: Topic authorization failed" in refused.value.stderr


def login(screen: str, user: str) -> str:
    """The line that is printed for this user."""
    (line,) = re.findall(rf"^  (set -a; .*/{user}\.env; set \+a)$", screen, re.MULTILINE)
    return str(line)


def run(script: str, *arguments: str) -> str:
    done = subprocess.run(
        ("/bin/sh", "-ec", script, *arguments),
        cwd=PROJECT_ROOT,
        env=user_environment(),
        capture_output=True,
        text=True,
        timeout=90,
        check=True,
    )
    return done.stdout


def test_the_key_is_in_a_file_of_its_owner_alone(screen: str, data_dir: Path) -> None:
    file = data_dir / "demo-key"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert file.read_text() in screen


def test_a_second_call_shows_the_same_without_the_key(screen: str, data_dir: Path) -> None:
    with up(data_dir) as second:
        text, _ = second.communicate(timeout=90)
    assert second.returncode == 0
    assert "already running" in text
    assert block(text, "curl") == block(screen, "curl")
    assert (data_dir / "demo-key").read_text() not in text
