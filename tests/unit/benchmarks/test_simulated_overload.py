"""Under sustained overload what is served waits no longer than its target, and the rest hears it at once."""

import pytest

from benchmarks.simulated_overload import ABLATIONS, ALL_PARTS, Parts, figures, isolation, simulated
from benchmarks.simulation import ConsumerFleet
from benchmarks.traffic import SHAPES, Traffic

TENANTS = tuple(f"tenant-{number}" for number in range(8))
FLEET = ConsumerFleet(2, 10_000.0, 8, 16_384)
SECONDS = 25.0


def measured(shape: str, parts: Parts = ALL_PARTS) -> list[float]:
    """Tokens served in time over capacity, p99 over the deadline, part of the admitted that were late, and p99 of the
    time to a refusal."""
    seen = simulated(Traffic(SHAPES[shape]), TENANTS, FLEET, 5.0, SECONDS, parts)
    return [figure.value for figure in figures("", seen, FLEET, SECONDS)]


@pytest.mark.parametrize("shape", ["burst", "one-giant", "drifting-lengths"])
def test_what_is_served_is_early_and_the_rest_is_refused_at_once(shape: str) -> None:
    goodput, p99, late, refusal_ms = measured(shape)
    assert goodput > 0.95
    assert p99 < 0.6
    assert late == 0
    assert refusal_ms == 0


@pytest.mark.parametrize("shape", ["constant", "one-giant"])
def test_a_flood_adds_little_to_the_latency_of_a_tenant_within_its_share(shape: str) -> None:
    # Of some hundred requests, so that their p99 is more than the worst of them.
    (figure,) = isolation(Traffic(SHAPES[shape]), [10.0], 40.0)
    assert figure.value <= 1.2


def test_without_targets_the_queue_stands_at_the_deadline() -> None:
    goodput, p99, *_ = measured("constant", ABLATIONS["without all three"])
    assert goodput > 0.9
    assert p99 > 0.85


def test_without_measured_shares_a_giant_is_promised_too_much() -> None:
    _, p99, *_ = measured("one-giant", ABLATIONS["without measured shares"])
    assert p99 > measured("one-giant")[1] + 0.1
