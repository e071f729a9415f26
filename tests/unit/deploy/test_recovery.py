"""A supervisor that is killed leaves nothing behind, and what is left nevertheless is ended by the next one."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.local.layout import PROJECT_ROOT, AlreadyRunningError, DataDir
from deploy.local.run_record import (
    RUN_ID_VARIABLE,
    ProcessId,
    ProcessRecord,
    RunRecord,
    State,
    acquire_lock,
    end_leftovers,
    identify,
    own_identity,
    stop_running,
)
from tests.kit.waiting import eventually

SUPERVISED = """
import sys
from deploy.local.layout import DataDir
from deploy.local.supervisor import ProcessSpec
from deploy.local.supervisor import Supervisor
from pathlib import Path
data_dir = DataDir(Path(sys.argv[1]))
specs = [ProcessSpec(name=name, argv=("/bin/sleep", "600")) for name in ("first", "second")]
with Supervisor(specs, log_dir=data_dir.logs, processes_file=data_dir.processes_file):
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def data_dir(tmp_path: Path) -> DataDir:
    made = DataDir(tmp_path)
    made.create()
    return made


@pytest.fixture
def stranger() -> Iterator[ProcessId]:
    """A process that no stack started."""
    with subprocess.Popen(("/bin/sleep", "600")) as process:
        identity = identify(process.pid)
        assert identity is not None
        yield identity
        process.kill()


def record(*identities: ProcessId, run_id: str = "run") -> RunRecord:
    processes = tuple(
        ProcessRecord(name=f"p{at}", state=State.READY, identity=identity, deaths=0, health_url=None)
        for at, identity in enumerate(identities)
    )
    return RunRecord(run_id=run_id, supervisor=ProcessId(1, 0), processes=processes)


def test_children_die_with_a_supervisor_that_is_killed(data_dir: DataDir) -> None:
    with subprocess.Popen(
        (sys.executable, "-c", SUPERVISED, str(data_dir.root)),
        cwd=PROJECT_ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as supervisor:
        assert supervisor.stdout is not None
        assert supervisor.stdout.readline() == "ready\n"
        written = RunRecord.load(data_dir.processes_file)
        assert written is not None
        children = [entry.identity for entry in written.processes if entry.identity is not None]
        assert len(children) == 2
        assert all(child.is_alive() for child in children)
        supervisor.kill()
    eventually(lambda: not any(child.is_alive() for child in children), what="the end of the children")
    assert data_dir.processes_file.exists(), "nobody was left to remove it"
    assert end_leftovers(data_dir) == []
    assert not data_dir.processes_file.exists()


def test_what_is_left_of_a_crashed_run_is_ended(data_dir: DataDir) -> None:
    recorded = subprocess.Popen(("/bin/sleep", "600"))
    descendant = subprocess.Popen(("/bin/sleep", "600"), env={RUN_ID_VARIABLE: "run"})
    identity = identify(recorded.pid)
    assert identity is not None
    record(identity).save(data_dir.processes_file)
    assert end_leftovers(data_dir) == sorted([recorded.pid, descendant.pid])
    assert recorded.wait(5) == descendant.wait(5) == -signal.SIGKILL


def test_what_lives_in_a_folder_of_the_data_is_ended(data_dir: DataDir, tmp_path: Path) -> None:
    folder = tmp_path / "cluster"
    folder.mkdir()
    resident = subprocess.Popen(("/bin/sleep", "600"), cwd=folder)
    assert end_leftovers(data_dir, (folder,)) == [resident.pid]
    assert resident.wait(5) == -signal.SIGKILL


def test_a_stranger_with_a_reused_pid_is_left_alone(data_dir: DataDir, stranger: ProcessId) -> None:
    record(ProcessId(stranger.pid, stranger.start_ticks - 1)).save(data_dir.processes_file)
    assert end_leftovers(data_dir) == []
    assert stranger.is_alive()


def test_a_damaged_record_is_none(data_dir: DataDir) -> None:
    for text in ("", "{", "[]", '{"run_id": "x"}', '{"run_id": "x", "supervisor": 1, "processes": []}'):
        data_dir.processes_file.write_text(text)
        assert RunRecord.load(data_dir.processes_file) is None
        assert end_leftovers(data_dir) == []


def test_a_record_survives_being_written(data_dir: DataDir) -> None:
    before = record(own_identity())
    before.save(data_dir.processes_file)
    assert RunRecord.load(data_dir.processes_file) == before


def test_one_data_directory_has_one_supervisor(data_dir: DataDir) -> None:
    first = acquire_lock(data_dir)
    record().save(data_dir.processes_file)
    with pytest.raises(AlreadyRunningError, match=r"already running in .* \(supervisor 1\): use it, stop it with"):
        acquire_lock(data_dir)
    first.close()
    acquire_lock(data_dir).close()


def test_down_without_a_stack_does_nothing(data_dir: DataDir, stranger: ProcessId) -> None:
    assert not stop_running(data_dir, 1)
    RunRecord("run", ProcessId(stranger.pid, stranger.start_ticks - 1), ()).save(data_dir.processes_file)
    assert not stop_running(data_dir, 1)
    assert stranger.is_alive()
