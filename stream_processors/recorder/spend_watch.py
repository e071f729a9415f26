"""The thread that compares what tenants spend in an hour with what they used to spend, and shows it as a gauge."""

from collections.abc import Callable, Sequence

import psycopg

from fairlane import metrics
from fairlane.clock import ClockMs, now_ms
from fairlane.logs import get_logger
from fairlane_server.costs.anomalies import HourlySpending
from fairlane_server.postgres.connection import ALL_TENANTS, ReconnectingConnection, reason
from fairlane_server.postgres.hourly_costs import read_hourly_spending
from stream_processors.recorder.watch import Watch

log = get_logger(__name__)

APPLICATION_NAME = "fairlane-spend-watch"

_INTERVAL_S = 60.0
_CALL_TIMEOUT_S = 10.0


class SpendWatch(Watch):
    """Looks once a minute. Every recorder of a fleet shows the same. ``on_failure`` is called on the thread with the
    error that ended it; Postgres that does not answer is none."""

    def __init__(
        self,
        dsn: str,
        least_nanos: int,
        on_failure: Callable[[BaseException], None],
        wall_clock: ClockMs = now_ms,
    ) -> None:
        super().__init__("spend-watch", _INTERVAL_S, on_failure)
        self._kept = ReconnectingConnection(dsn, APPLICATION_NAME, _CALL_TIMEOUT_S)
        self._least_nanos = least_nanos
        self._wall_clock = wall_clock
        self._shown: set[tuple[str, str]] = set()
        self._known: set[tuple[str, str, int]] = set()

    def close(self) -> None:
        self._kept.close()

    def look(self) -> None:
        """Compare once."""
        try:
            with self._kept.transaction(ALL_TENANTS) as connection:
                found = read_hourly_spending(connection, self._wall_clock(), self._least_nanos)
        except psycopg.Error as error:
            log.warning("spending_not_compared", reason=reason(error))
            return
        self._show(found)

    def _show(self, found: Sequence[HourlySpending]) -> None:
        ratios: dict[tuple[str, str], float] = {}
        anomalies = {(one.tenant, one.currency, one.hour) for one in found if one.is_anomaly}
        for one in found:
            place = one.tenant, one.currency
            ratios[place] = max(one.ratio, ratios.get(place, 0.0))
            if one.is_anomaly and (*place, one.hour) not in self._known:
                log.warning(
                    "unusual_spending",
                    tenant=one.tenant,
                    currency=one.currency,
                    hour=one.hour,
                    nanos=one.nanos,
                    usual_nanos=one.median_nanos,
                    limit_nanos=one.limit_nanos,
                )
        self._shown = metrics.show(metrics.SPEND_ANOMALY_RATIO, ratios, self._shown)
        self._known = anomalies
