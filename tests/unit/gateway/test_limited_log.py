"""A few lines of what happens with every call, and how many were left out."""

import pytest
import structlog
from structlog.testing import capture_logs

from producers.gateway.limited_log import LimitedLog


@pytest.mark.parametrize("times", [1, 1_000])
def test_what_is_left_out_is_counted_in_the_next_line(times: int) -> None:
    now_ms = 0
    limited = LimitedLog(structlog.get_logger(), lambda: now_ms)
    with capture_logs() as lines:
        for _ in range(3):
            limited.warning("away", name="a")
        assert [line["not_logged_before"] for line in lines] == [0, 0, 0]
        for _ in range(times):
            limited.warning("away", name="b")
        limited.warning("another", name="c")
        assert [line["event"] for line in lines] == ["away"] * 3 + ["another"]
        now_ms = 6_000
        limited.warning("away", name="d")
        limited.warning("away", name="e")
    assert lines[-1] == {"event": "away", "log_level": "warning", "name": "d", "not_logged_before": times}
