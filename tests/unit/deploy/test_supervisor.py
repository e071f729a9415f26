"""The supervisor with small real processes: order, readiness, restarts, giving up, stopping."""

import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from deploy.local.layout import DataDir, StackError
from deploy.local.logs import log_path
from deploy.local.run_record import ProcessId, RunRecord, State, identify
from deploy.local.supervisor import Instance, ProcessSpec, Supervisor, describe_exit
from fairlane_server.processes.restarts import RestartPolicy
from tests.kit.waiting import eventually

QUICK = RestartPolicy(first_delay_s=0.01, max_delay_s=0.02)
FOREVER = "while :; do sleep 60; done"


@dataclass
class Bench:
    """A folder for one supervisor, and what it reported."""

    data_dir: DataDir
    reports: list[tuple[str, str]] = field(default_factory=list)
    lines: list[tuple[str, str]] = field(default_factory=list)
    supervisors: list[Supervisor] = field(default_factory=list)

    def supervisor(
        self, *specs: ProcessSpec, max_log_bytes: int = 1_000_000, policy: RestartPolicy = QUICK
    ) -> Supervisor:
        made = Supervisor(
            specs,
            log_dir=self.data_dir.logs,
            processes_file=self.data_dir.processes_file,
            policy=policy,
            report=lambda name, message: self.reports.append((name, message)),
            sink=lambda name, line: self.lines.append((name, line)),
            max_log_bytes=max_log_bytes,
        )
        self.supervisors.append(made)
        return made

    def reported(self, name: str, part: str) -> Callable[[], bool]:
        return lambda: any(by == name and part in message for by, message in self.reports)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(DataDir(tmp_path))
    made.data_dir.create()
    yield made
    for supervisor in made.supervisors:
        supervisor.stop()


def shell(name: str, script: str, *arguments: str, **options: object) -> ProcessSpec:
    """A process that runs a shell script."""
    return ProcessSpec(name=name, argv=("/bin/sh", "-c", script, name, *arguments), **options)  # type: ignore[arg-type] # passed on


def exists(path: Path) -> Callable[[], str | None]:
    return lambda: None if path.exists() else f"no {path.name}"


def started(view_pid: int | None) -> ProcessId:
    assert view_pid is not None
    identity = identify(view_pid)
    assert identity is not None
    return identity


def test_each_starts_once_all_it_depends_on_are_ready(bench: Bench, tmp_path: Path) -> None:
    order = tmp_path / "order"
    server = shell(
        "server", f'echo server >> "$1"; touch "$1.ready"; {FOREVER}', str(order), probe=exists(Path(f"{order}.ready"))
    )
    step = shell("step", 'echo step >> "$1"', str(order), one_shot=True, depends_on=("server",))
    service = shell(
        "service",
        f'echo service >> "$1"; touch "$1.up"; {FOREVER}',
        str(order),
        depends_on=("step",),
        probe=exists(Path(f"{order}.up")),
    )
    with bench.supervisor(server, step, service) as supervisor:
        assert order.read_text().split() == ["server", "step", "service"]
        assert [view.state for view in supervisor.processes()] == [State.READY, State.DONE, State.READY]
        record = RunRecord.load(bench.data_dir.processes_file)
        assert record is not None
        assert {entry.name: entry.identity and entry.identity.pid for entry in record.processes} == {
            view.name: view.pid for view in supervisor.processes()
        }
    assert not bench.data_dir.processes_file.exists()


def test_a_step_that_fails_stops_the_stack_with_its_output(bench: Bench) -> None:
    server = shell("server", FOREVER)
    step = shell("step", "echo 'topics.yaml:3: unknown key' >&2; exit 2", one_shot=True, depends_on=("server",))
    never = shell("never", FOREVER, depends_on=("step",))
    supervisor = bench.supervisor(server, step, never)
    with pytest.raises(StackError, match=r"(?s)step: exit status 2; the end of its log .*topics.yaml:3: unknown key"):
        supervisor.start()
    assert [view.pid for view in supervisor.processes()] == [None, None, None]
    assert not log_path(bench.data_dir.logs, "never").exists()


def test_what_does_not_become_ready_in_time_stops_the_stack_with_the_reason(bench: Bench, tmp_path: Path) -> None:
    slow = shell("slow", FOREVER, probe=exists(tmp_path / "never"), start_timeout_s=0.3)
    with pytest.raises(StackError, match=r"slow: not ready after 0\.3 s: no never"):
        bench.supervisor(slow).start()


def test_a_program_that_does_not_exist_is_named(bench: Bench) -> None:
    with pytest.raises(StackError, match="/nowhere/program cannot be started: No such file"):
        bench.supervisor(ProcessSpec(name="none", argv=("/nowhere/program",), one_shot=True)).start()


def test_a_probe_that_raises_counts_as_not_ready(bench: Bench) -> None:
    def broken() -> str | None:
        raise ValueError("broken probe")

    with pytest.raises(StackError, match="broken probe"):
        bench.supervisor(shell("slow", FOREVER, probe=broken, start_timeout_s=0.3)).start()


def test_what_dies_is_restarted_and_said_so_with_the_end_of_its_log(bench: Bench) -> None:
    victim = shell("victim", f"echo last words; {FOREVER}")
    other = shell("other", FOREVER)
    with bench.supervisor(victim, other) as supervisor:
        untouched = supervisor.process("other").pid
        eventually(lambda: ("victim", "last words") in bench.lines, what="the line of the log")
        pid = supervisor.kill("victim")
        view = supervisor.wait_ready("victim", 10, other_than_pid=pid)
        assert view.deaths == 1
        assert view.pid != pid
        eventually(bench.reported("victim", "died (killed by SIGKILL), restarting in"))
        assert bench.reported("victim", "    last words")()
        assert supervisor.process("other").pid == untouched
        assert supervisor.process("other").deaths == 0


def test_what_keeps_dying_stops_the_stack_with_that_reason(bench: Bench) -> None:
    looping = shell("looping", "echo cannot bind; exit 3")
    other = shell("other", FOREVER)
    supervisor = bench.supervisor(looping, other)
    try:
        supervisor.start()
        assert supervisor.wait(20)
    except StackError:
        pass  # it was given up while the other one was still starting
    assert supervisor.failure is not None
    assert supervisor.failure.startswith(
        "looping: died 6 times within 60 s, the last time with exit status 3; the end of"
    )
    assert "cannot bind" in supervisor.failure
    assert [view.pid for view in supervisor.processes()] == [None, None]
    with pytest.raises(StackError, match="looping: died"):
        supervisor.wait_ready("other", 1)


def test_all_are_stopped_in_reverse_order(bench: Bench, tmp_path: Path) -> None:
    order = tmp_path / "order"
    script = 'trap \'echo $0 >> "$1"; exit 0\' TERM; touch "$1.$0"; while :; do sleep 0.01; done'
    names = ("kafka", "dispatcher", "consumer")
    specs = [
        shell(name, script, str(order), depends_on=names[:at], probe=exists(Path(f"{order}.{name}")))
        for at, name in enumerate(names)
    ]
    with bench.supervisor(*specs):
        pass
    assert order.read_text().split() == list(reversed(names))


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_the_stop_signal_is_the_one_of_the_process(bench: Bench, tmp_path: Path, signum: signal.Signals) -> None:
    mark = tmp_path / "mark"
    name = signum.name.removeprefix("SIG")
    script = f'trap \'echo {name} > "$1"; exit 0\' {name}; touch "$1.up"; while :; do sleep 0.01; done'
    spec = shell("server", script, str(mark), stop_signal=signum, probe=exists(Path(f"{mark}.up")))
    with bench.supervisor(spec):
        pass
    assert mark.read_text().strip() == name


def test_what_ignores_the_stop_signal_is_killed(bench: Bench, tmp_path: Path) -> None:
    script = f'trap "" TERM; touch "$1"; {FOREVER}'
    up = tmp_path / "up"
    supervisor = bench.supervisor(shell("stubborn", script, str(up), stop_timeout_s=0.2, probe=exists(up)))
    supervisor.start()
    process = started(supervisor.process("stubborn").pid)
    supervisor.stop()
    assert not process.is_alive()
    assert bench.reported("stubborn", "did not stop within 0.2 s")()


def test_in_a_hurry_nothing_is_waited_for(bench: Bench, tmp_path: Path) -> None:
    up = tmp_path / "up"
    supervisor = bench.supervisor(shell("stubborn", f'trap "" TERM; touch "$1"; {FOREVER}', str(up), probe=exists(up)))
    supervisor.start()
    supervisor.request_stop()
    supervisor.request_stop(now=True)
    assert supervisor.wait(5), "the stop timeout is 15 s"
    assert not bench.reported("stubborn", "did not stop")()


def test_a_paused_process_is_stopped_too(bench: Bench) -> None:
    supervisor = bench.supervisor(shell("paused", FOREVER, stop_timeout_s=60))
    supervisor.start()
    supervisor.kill("paused", signal.SIGSTOP)
    supervisor.request_stop()
    assert supervisor.wait(10)


def test_what_a_process_started_goes_with_it(bench: Bench, tmp_path: Path) -> None:
    note = tmp_path / "note"
    script = f'sleep 600 & echo $! > "$1.new"; mv "$1.new" "$1"; {FOREVER}'
    with bench.supervisor(shell("parent", script, str(note), probe=exists(note))) as supervisor:
        first = started(int(note.read_text()))
        pid = supervisor.kill("parent")
        supervisor.wait_ready("parent", 10, other_than_pid=pid)
        eventually(lambda: not first.is_alive(), what="the end of the grandchild")
        eventually(lambda: int(note.read_text()) != first.pid)
        second = started(int(note.read_text()))
    eventually(lambda: not second.is_alive(), what="the end of the second grandchild")


def test_what_it_started_goes_with_it_also_when_a_signal_comes_after_its_end(tmp_path: Path) -> None:
    note = tmp_path / "note"
    script = f'sleep 600 & echo $! > "$1.new"; mv "$1.new" "$1"; {FOREVER}'
    instance = Instance(shell("parent", script, str(note)), tmp_path / "log", {})
    eventually(note.exists)
    grandchild = started(int(note.read_text()))
    instance.send(signal.SIGKILL)
    eventually(lambda: not instance.identity.is_alive(), what="the end of the parent")
    instance.ask_to_stop(signal.SIGTERM)
    assert instance.collect() == -signal.SIGKILL
    eventually(lambda: not grandchild.is_alive(), what="the end of the grandchild")


def test_a_restart_that_was_asked_for_is_no_death(bench: Bench) -> None:
    with bench.supervisor(shell("service", FOREVER)) as supervisor:
        pid = supervisor.process("service").pid
        supervisor.restart("service")
        view = supervisor.wait_ready("service", 10, other_than_pid=pid)
        assert view.deaths == 0


def test_what_waits_for_its_restart_can_be_started_sooner(bench: Bench) -> None:
    hours_later = RestartPolicy(first_delay_s=36_000, max_delay_s=36_000)
    with bench.supervisor(shell("service", FOREVER), policy=hours_later) as supervisor:
        with pytest.raises(StackError, match="service is ready and does not wait"):
            supervisor.start_now("service")
        pid = supervisor.kill("service")
        eventually(lambda: supervisor.process("service").state is State.BACKING_OFF, what="the death of the service")
        supervisor.start_now("service")
        view = supervisor.wait_ready("service", 10, other_than_pid=pid)
        assert view.deaths == 1


def test_signals_go_to_running_processes_only(bench: Bench) -> None:
    with bench.supervisor(shell("step", "exit 0", one_shot=True)) as supervisor:
        for act in (supervisor.kill, supervisor.restart):
            with pytest.raises(StackError, match="step does not run now"):
                act("step")


def test_a_stop_while_starting_ends_the_start(bench: Bench, tmp_path: Path) -> None:
    supervisor = bench.supervisor(shell("slow", f"echo up; {FOREVER}", probe=exists(tmp_path / "never")))
    errors: list[StackError] = []

    def start() -> None:
        try:
            supervisor.start()
        except StackError as error:
            errors.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    eventually(lambda: ("slow", "up") in bench.lines, what="the start of the process")
    supervisor.request_stop()
    thread.join(10)
    assert [str(error) for error in errors] == ["stopped while it was starting"]


def test_logs_are_kept_apart_rotated_and_bounded(bench: Bench) -> None:
    log_path(bench.data_dir.logs, "noisy").write_text("of the last run\n")
    noisy = shell("noisy", 'while :; do echo "a line of output"; done')
    quiet = shell("quiet", f"echo quiet; {FOREVER}")
    log = log_path(bench.data_dir.logs, "noisy")
    old = log.with_name("noisy.log.1")
    with bench.supervisor(noisy, quiet, max_log_bytes=10_000):
        eventually(
            lambda: ("quiet", "quiet") in bench.lines and "a line of output" in old.read_text(), what="the rotation"
        )
    assert log_path(bench.data_dir.logs, "quiet").read_text() == "quiet\n"
    assert ("noisy", "a line of output") in bench.lines


def test_the_environment_is_inherited_but_for_what_is_withheld(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIRLANE_TEST_KEPT", "kept")
    monkeypatch.setenv("FAIRLANE_TEST_WITHHELD", "withheld")
    spec = shell(
        "printer",
        'echo "$FAIRLANE_TEST_KEPT ${FAIRLANE_TEST_WITHHELD-gone} $FAIRLANE_TEST_ADDED"',
        env={"FAIRLANE_TEST_ADDED": "added"},
        without_env=("FAIRLANE_TEST_WITHHELD",),
        one_shot=True,
    )
    with bench.supervisor(spec):
        assert log_path(bench.data_dir.logs, "printer").read_text().strip() == "kept gone added"


def test_names_and_dependencies_are_checked(bench: Bench) -> None:
    with pytest.raises(ValueError, match="two processes are named a"):
        bench.supervisor(shell("a", ""), shell("a", ""))
    with pytest.raises(ValueError, match=r"a depends on \['b'\], which no process before it provides"):
        bench.supervisor(shell("a", "", depends_on=("b",)), shell("b", ""))


def test_exits_in_words() -> None:
    assert describe_exit(0) == "exit status 0"
    assert describe_exit(-9) == "killed by SIGKILL"
    assert describe_exit(-63) == "killed by signal 63"
