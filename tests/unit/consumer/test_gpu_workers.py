"""Which processes are planned, and on which devices."""

import pytest

from inference_consumers.gpu_workers import GpusError, Worker, gpus_to_use, plan_workers


def none_asked() -> int:
    raise AssertionError("nobody has to be asked")


@pytest.mark.parametrize(
    ("asked", "visible", "found", "used"),
    [
        ("none", "0,1", None, ()),
        ("0,1", None, None, ("0", "1")),
        ("3", "0,1", None, ("3",)),
        ("auto", None, 2, ("0", "1")),
        ("auto", None, 0, ()),
        ("auto", "2,5", 2, ("2", "5")),
        ("auto", "GPU-8f0e", 1, ("GPU-8f0e",)),
        ("auto", "", 0, ()),
        ("auto", "0", 0, ()),
    ],
)
def test_the_devices_are_those_named_or_those_there_are(
    asked: str, visible: str | None, found: int | None, used: tuple[str, ...]
) -> None:
    assert gpus_to_use(asked, visible, none_asked if found is None else lambda: found) == used


@pytest.mark.parametrize(("asked", "reason"), [("0,,1", "empty"), ("", "empty"), ("0,1,0", "twice")])
def test_names_that_make_no_sense_are_refused(asked: str, reason: str) -> None:
    with pytest.raises(GpusError, match=reason):
        gpus_to_use(asked, None, none_asked)


def test_each_worker_has_its_own_gpus() -> None:
    assert plan_workers(("0", "1", "2", "3"), 1, 9) == [Worker(number, (str(number),)) for number in range(4)]
    assert plan_workers(("0", "1", "2", "3"), 2, 9) == [Worker(0, ("0", "1")), Worker(1, ("2", "3"))]
    assert plan_workers((), 2, 3) == [Worker(0), Worker(1), Worker(2)]
    assert plan_workers((), 1, 3, cores=8) == [Worker(number, threads=2) for number in range(3)]
    assert plan_workers((), 1, 3, cores=2) == [Worker(number, threads=1) for number in range(3)]
    assert plan_workers(("0",), 1, 3, cores=8) == [Worker(0, ("0",))]
    with pytest.raises(GpusError, match="3 GPUs cannot be shared out by 2"):
        plan_workers(("0", "1", "2"), 2, 1)


def test_each_worker_has_its_own_name_and_port() -> None:
    base = {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "0,1", "INSTANCE_ID": "gpu-host"}
    made = Worker(1, ("1",)).environment(base, "gpu-host", 9_100)
    assert made == {
        "PATH": "/bin",
        "CUDA_VISIBLE_DEVICES": "1",
        "INSTANCE_ID": "gpu-host-1",
        "METRICS_PORT": "9101",
    }
    assert Worker(1).environment(base, "gpu-host", 0)["METRICS_PORT"] == "0"


def test_a_worker_without_gpus_sees_none_and_has_its_part_of_the_cores() -> None:
    made = Worker(1, threads=2).environment({"CUDA_VISIBLE_DEVICES": "0,1"}, "host", 0)
    assert (made["CUDA_VISIBLE_DEVICES"], made["ENGINE_THREADS"]) == ("", "2")
    assert "ENGINE_THREADS" not in Worker(1).environment({}, "host", 0)
