"""When a dead process is started again, and when it is given up."""

from hypothesis import given
from hypothesis import strategies as st

from fairlane_server.processes.restarts import EXIT_NO_RESTART, RestartPolicy

POLICY = RestartPolicy(max_deaths=5, window_s=60.0, first_delay_s=0.2, max_delay_s=5.0, jitter=0.25)
MIDDLE = 0.5


def test_the_wait_doubles_with_each_death_in_the_window() -> None:
    deaths = [0.0, 1.0, 2.0, 3.0]
    waits = [POLICY.decide(deaths[: count + 1], deaths[count], MIDDLE) for count in range(len(deaths))]
    assert waits == [0.2, 0.4, 0.8, 1.6]


def test_more_deaths_than_allowed_within_the_window_is_the_end() -> None:
    assert isinstance(POLICY.decide([0, 1, 2, 3, 4], 4, MIDDLE), float)
    assert POLICY.decide([0, 1, 2, 3, 4, 5], 5, MIDDLE) == "died 6 times within 60 s"


def test_old_deaths_are_forgotten() -> None:
    assert POLICY.decide([0, 1, 2, 3, 4, 100], 100, MIDDLE) == 0.2
    assert POLICY.within_window([0, 1, 39.9, 40, 100], 100) == [40, 100]


@given(
    gaps=st.lists(st.floats(min_value=0, max_value=200), min_size=1, max_size=40),
    chance=st.floats(min_value=0, max_value=1, exclude_max=True),
)
def test_every_wait_is_bounded_and_never_zero(gaps: list[float], chance: float) -> None:
    deaths: list[float] = []
    now = 0.0
    for gap in gaps:
        now += gap
        deaths.append(now)
        decision = POLICY.decide(deaths, now, chance)
        if isinstance(decision, float):
            assert 0.2 * 0.75 <= decision <= 5.0 * 1.25
        else:
            assert sum(now - death <= 60.0 for death in deaths) > POLICY.max_deaths


def test_what_asks_not_to_be_started_again_is_not() -> None:
    assert POLICY.decide([0], 0, MIDDLE, EXIT_NO_RESTART) == "asked not to be started again"
    assert isinstance(POLICY.decide([0], 0, MIDDLE, 1), float)
