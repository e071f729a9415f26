"""The benchmarks that strike services, in a short version: that they strike, and see what came of it."""

import random
from collections.abc import Sequence

import pytest

from benchmarks import exactly_once, rolling_restart, update
from benchmarks.faults.plan import END, KILL, PAUSE, SEED_VARIABLE, Cast, Fault, FaultTarget
from benchmarks.faults.traffic import CampaignLoad

pytestmark = [pytest.mark.full, pytest.mark.broker]


def test_exactly_once_holds_the_log_and_postgres_against_what_was_published(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kills of another test leave out: a pause, an engine's death, an orderly end and the broker's."""
    monkeypatch.setenv(SEED_VARIABLE, "5")

    def plan(dice: random.Random, cast: Cast) -> Sequence[Fault]:
        return [
            Fault(PAUSE, FaultTarget.CONSUMER, (dice.choice(cast.consumers),)),
            Fault(KILL, FaultTarget.ENGINE, (dice.choice(cast.consumers),)),
            Fault(END, FaultTarget.DISPATCHER, (dice.choice(cast.dispatchers),)),
            Fault(END, FaultTarget.BROKER, cast.of(FaultTarget.BROKER)),
        ]

    result = exactly_once.run(plan, CampaignLoad(requests=200, per_s=30, burst=40, max_delay_s=0.5))
    figures = {figure.name: figure.value for figure in result.figures}

    assert result.met, result.figures
    assert figures["requests"] >= 200
    assert figures["faults and restarts of the broker"] == figures["of these with work outstanding"] == 4
    assert figures["longest time without a reply"] > 0
    assert figures["seed"] == 5
    assert {name: count for name, count in result.runs[0].items() if name.startswith("SIG")} == {
        "SIGKILL engine": 1,
        "SIGSTOP consumer": 1,
        "SIGTERM broker": 1,
        "SIGTERM dispatcher": 1,
    }


def test_rolling_restart_compares_itself_with_its_calm() -> None:
    result = rolling_restart.run(calm_s=3.0, consumers=rolling_restart.CONSUMERS[:1])
    figures = {figure.name: figure.value for figure in result.figures}

    assert figures["requests that were not served"] == 0
    assert figures["requests"] > figures["of these published while consumers were restarted"] > 0
    assert all(figure.value > 0 for figure in result.figures if figure.unit in ("ms", "s"))
    assert 0 < figures["longest end"] < figures["longest restart, until it owned partitions"]


@pytest.mark.model
def test_update_compares_itself_with_its_calm_and_gives_the_memory_back() -> None:
    setting = update.Setting(1, has_room=True)
    result = update.run(calm_s=3.0, settings=[setting])
    figures = {figure.name: figure.value for figure in result.figures}

    assert figures["requests refused or lost"] == 0
    assert figures["requests during the updates"] > 0
    before, most, after = (
        figures[f"{setting.name}: {name}"] for name in ("memory before", "most memory during", "memory after")
    )
    assert before < most
    assert after < 1.2 * before
