"""A launcher on the real broker: its workers share the pool, are started again when they die, and end with it."""

import signal
from pathlib import Path

import psutil
import pytest

from deploy.local.services import Service
from fairlane.outcomes import Outcome
from tests.kit.pipeline import Pipeline
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.full, pytest.mark.broker]

TIMEOUT_MS = 60_000


def workers_of(launcher: psutil.Process) -> list[psutil.Process]:
    return [child for child in launcher.children() if is_there(child) and "--workers" not in command_of(child)]


def command_of(process: psutil.Process) -> list[str]:
    """Empty for one that ended meanwhile."""
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []


def is_there(process: psutil.Process) -> bool:
    """Whether it runs; one that ended and was not waited for does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_workers_serve_die_come_back_and_end_with_their_launcher(broker: str, tmp_path: Path, unique: str) -> None:
    with Pipeline(broker, tmp_path, unique, tenants=("a",)) as pipeline:
        pipeline.dispatcher().wait_ready()
        pipeline.wait_all_own()
        arguments = ("-m", "inference_consumers", "--pool", pipeline.pool, "--engine", "simulated", "--workers", "2")
        launched = pipeline.launch(Service("launcher", arguments, {}))
        launcher = psutil.Process(launched.pid)

        def both_own() -> bool:
            owned = pipeline.assignments(pipeline.pool_group())
            return len(owned) == 2 and all(owned.values())

        eventually(both_own, 30, "both workers own partitions")
        first, second = workers_of(launcher)
        replies = pipeline.replies("a")
        requests = [pipeline.request(timeout_ms=TIMEOUT_MS) for _ in range(20)]
        pipeline.publish("a", *requests)
        first.kill()
        eventually(lambda: len(workers_of(launcher)) == 2 and first not in workers_of(launcher), 20, "a new worker")
        answers = replies.wait([request.request_id for request in requests], 40)
        assert {answer.outcome for answer in answers.values()} == {Outcome.OK}
        (event,) = launched.events("worker_died")
        assert event["status"] == -signal.SIGKILL

        everybody = [*workers_of(launcher), *(child for worker in workers_of(launcher) for child in worker.children())]
        assert second in everybody
        assert launched.stop() == 0
        eventually(lambda: not any(map(is_there, everybody)), what="the end of them all")


def test_workers_do_not_outlive_a_launcher_that_was_killed(broker: str, tmp_path: Path, unique: str) -> None:
    with Pipeline(broker, tmp_path, unique, tenants=("a",)) as pipeline:
        arguments = ("-m", "inference_consumers", "--pool", pipeline.pool, "--engine", "simulated", "--workers", "1")
        launched = pipeline.launch(Service("launcher", arguments, {}))
        launcher = psutil.Process(launched.pid)
        eventually(lambda: pipeline.assignments(pipeline.pool_group()), 30, "a worker in the group")
        (worker,) = workers_of(launcher)
        everybody = [worker, *worker.children()]
        assert len(everybody) > 1
        launched.kill()
        eventually(lambda: not any(map(is_there, everybody)), 20, "the end of the worker and its engines")
