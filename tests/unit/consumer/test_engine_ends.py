"""Why an engine's process ended, and what the kernel says of it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from inference_consumers.engine_process.failures import EndKind, EngineEnd, end_by_error, end_of
from inference_consumers.engine_process.process_facts import OomKills, cpu_ms, is_stopped, oom_kills
from tests.kit.waiting import eventually


@pytest.mark.parametrize(
    ("status", "kernel_killed", "end", "is_own"),
    [
        (-signal.SIGSEGV, False, EngineEnd(EndKind.CRASHED, "killed by SIGSEGV"), True),
        (-signal.SIGABRT, True, EngineEnd(EndKind.CRASHED, "killed by SIGABRT"), True),
        (-signal.SIGKILL, False, EngineEnd(EndKind.KILLED, "killed by SIGKILL"), False),
        (-signal.SIGKILL, True, EngineEnd(EndKind.OUT_OF_MEMORY, "killed by SIGKILL: out of memory"), True),
        (-signal.SIGTERM, True, EngineEnd(EndKind.KILLED, "killed by SIGTERM"), False),
        (-signal.SIGHUP, False, EngineEnd(EndKind.KILLED, "killed by SIGHUP"), False),
        (-(signal.SIGRTMIN + 1), False, EngineEnd(EndKind.KILLED, f"killed by signal {signal.SIGRTMIN + 1}"), False),
        (0, False, EngineEnd(EndKind.EXITED, "exit status 0"), True),
        (3, True, EngineEnd(EndKind.EXITED, "exit status 3"), True),
    ],
)
def test_an_exit_status_says_whose_doing_it_was(status: int, kernel_killed: bool, end: EngineEnd, is_own: bool) -> None:
    found = end_of(status, kernel_killed=kernel_killed)
    assert (found, found.is_own) == (end, is_own)


def test_an_engine_that_lost_another_process_is_not_at_fault() -> None:
    assert end_by_error("EngineDeadError") == EngineEnd(EndKind.LOST, "EngineDeadError")
    assert end_by_error("AcceleratorError").is_own
    assert not end_by_error("EngineDeadError").is_own


def test_the_kernels_count_is_read_in_both_of_its_forms() -> None:
    assert oom_kills("low 0\nhigh 2\nmax 31\noom 4\noom_kill 3\noom_group_kill 1\n") == 3
    assert oom_kills("oom_kill_disable 0\nunder_oom 0\noom_kill 7\n") == 7
    assert oom_kills("oom_kill_disable 0\nunder_oom 0\n") is None
    assert oom_kills("") is None


@pytest.mark.parametrize(
    ("line", "file"),
    [
        ("0::/system.slice/fairlane", "system.slice/fairlane/memory.events"),
        ("0::/not-seen-from-here", "memory.events"),
        ("4:cpu,memory:/pod/1", "memory/pod/1/memory.oom_control"),
        ("4:memory:/docker/1", "memory/memory.oom_control"),
    ],
)
def test_the_count_is_that_of_the_own_group(tmp_path: Path, line: str, file: str) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"7:pids:/\n{line}\n")
    counters = tmp_path / "cgroup" / file
    counters.parent.mkdir(parents=True)
    counters.write_text("oom_kill 1\n")
    kills = OomKills(tmp_path / "proc", tmp_path / "cgroup")
    assert kills.count() == 1
    counters.write_text("oom_kill 2\n")
    assert kills.count() == 2
    counters.unlink()
    assert kills.count() is None


def test_where_nothing_is_counted_nothing_is_known(tmp_path: Path) -> None:
    assert OomKills(tmp_path, tmp_path).count() is None


def test_a_process_that_was_stopped_is_seen_to_be_and_so_is_its_child() -> None:
    code = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE)\n"
        "print(child.pid, flush=True)\n"
        "input()\n"
        "child.communicate()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout is not None
        for pid in (process.pid, int(process.stdout.readline())):
            assert not is_stopped(process.pid)
            os.kill(pid, signal.SIGSTOP)
            eventually(lambda: is_stopped(process.pid), 10, "a stopped process")
            os.kill(pid, signal.SIGCONT)
            eventually(lambda: not is_stopped(process.pid), 10, "a process that runs on")
        process.communicate("\n", timeout=10)
    assert not is_stopped(process.pid)


def test_what_a_process_and_its_child_compute_is_seen_and_waiting_is_not() -> None:
    code = (
        "import subprocess, sys\n"
        "loop = 'input()\\nwhile True: pass'\n"
        "child = subprocess.Popen([sys.executable, '-c', loop], stdin=subprocess.PIPE)\n"
        "print(flush=True)\n"
        "input()\n"
        "child.stdin.write(b'go\\n')\n"
        "child.stdin.flush()\n"
        "input()\n"
        "child.kill()\n"
        "child.wait()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        before_ms = cpu_ms(process.pid)
        assert before_ms is not None
        process.stdin.write("\n")
        process.stdin.flush()
        eventually(lambda: (cpu_ms(process.pid) or 0) > before_ms + 500, 20, "a child that computes")
        process.communicate("\n", timeout=10)
    assert cpu_ms(process.pid) is None


def test_the_times_of_a_process_are_read_whatever_its_name_is(tmp_path: Path) -> None:
    for pid, name, state, ticks, children in (
        (7, "a) R 1 (b", "D", "150 50", "8 9"),
        (8, "python", "S", "25 0", ""),
        (9, "gone", "Z", "", ""),
    ):
        (tmp_path / f"{pid}/task/{pid}").mkdir(parents=True)
        (tmp_path / f"{pid}/task/{pid}/children").write_text(children)
        fields = f"{pid} ({name}) {state} 1 1 1 0 -1 0 0 0 0 0 {ticks} 0 0 20 0 1\n"
        (tmp_path / f"{pid}/stat").write_text(fields if ticks else "")
    per_tick = 1_000 // os.sysconf("SC_CLK_TCK")
    assert cpu_ms(7, tmp_path) == 225 * per_tick
    assert cpu_ms(9, tmp_path) is None
    assert not is_stopped(7, tmp_path)
