"""Ports of two stacks never clash, and a stack keeps its ports."""

import socket
import subprocess
import sys
from pathlib import Path

from deploy.local import ports
from deploy.local.layout import PROJECT_ROOT
from deploy.local.ports import PortClaims, is_free


def test_two_stacks_that_choose_at_the_same_time_choose_different_ports(tmp_path: Path) -> None:
    first, second = PortClaims(tmp_path / "first"), PortClaims(tmp_path / "second")
    port = first.take("kafka")
    # The second one remembers the very same port of an earlier run; nobody listens on it yet.
    (tmp_path / "third").write_text((tmp_path / "first").read_text())
    third = PortClaims(tmp_path / "third")
    assert third.take("kafka") != port
    assert len({first.take("redis"), second.take("redis"), third.take("redis")}) == 3
    for claims in (first, second, third):
        claims.close()


def test_a_claim_of_another_process_counts(tmp_path: Path) -> None:
    script = (
        "from pathlib import Path; from deploy.local.ports import PortClaims; import sys; "
        f"claims = PortClaims(Path({str(tmp_path / 'ports')!r})); "
        "print(claims.take('kafka'), flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        (sys.executable, "-c", script), cwd=PROJECT_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        claimed = int(other.stdout.readline())
        ours = PortClaims(tmp_path / "ports")
        chosen = ours.take("kafka")
        ours.close()
        other.communicate(timeout=10)
    assert chosen != claimed


def test_the_claims_of_a_process_that_died_are_free_again(tmp_path: Path) -> None:
    script = (
        "from pathlib import Path; from deploy.local.ports import PortClaims; import os; "
        f"print(PortClaims(Path({str(tmp_path / 'ports')!r})).take('kafka'), flush=True); os.abort()"
    )
    answer = subprocess.run(
        (sys.executable, "-c", script), cwd=PROJECT_ROOT, capture_output=True, text=True, check=False, timeout=30
    )
    ours = PortClaims(tmp_path / "ports")
    assert ours.take("kafka") == int(answer.stdout)
    ours.close()


def test_a_port_that_is_taken_is_passed_over(tmp_path: Path) -> None:
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        port = stranger.getsockname()[1]
        assert not is_free(port)
        (tmp_path / "ports").write_text(f'{{"kafka": {port}}}')
        claims = PortClaims(tmp_path / "ports")
        assert claims.take("kafka") != port
        claims.close()


def test_a_stack_keeps_its_ports_over_restarts(tmp_path: Path) -> None:
    before = PortClaims(tmp_path / "ports")
    kafka, redis = before.take("kafka"), before.take("redis")
    before.close()
    after = PortClaims(tmp_path / "ports")
    assert (after.take("kafka"), after.take("redis")) == (kafka, redis)
    assert after.take("kafka") == kafka
    after.close()


def test_a_damaged_file_of_ports_is_ignored(tmp_path: Path) -> None:
    for text in ("{", "[1]", '{"kafka": "x"}'):
        (tmp_path / "ports").write_text(text)
        claims = PortClaims(tmp_path / "ports")
        assert ports.FIRST_PORT <= claims.take("kafka") <= ports.LAST_PORT
        claims.close()
