"""The benchmark of the queue, in small: its figures are there and sane. What they come to is for a quiet machine."""

from benchmarks.queue_cost import run


def test_every_policy_is_measured_beside_the_heap() -> None:
    result = run(waiting=600, tenants=20, turns=200)

    figures = {figure.name: figure for figure in result.figures}
    for policy in ("drr", "vtc", "fifo"):
        assert figures[f"{policy}: push and pop"].value > 0
        assert figures[f"{policy}: divided by a bare heap's"].unit == "ratio"
        assert 0 < figures[f"{policy}: memory per request"].value < 1_024
    assert len(result.runs) == 3
