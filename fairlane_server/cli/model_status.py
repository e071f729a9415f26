"""``fairlane models status``: which consumers have loaded which versions."""

from collections.abc import Iterator

from fairlane.clock import now_ms
from fairlane.records import CapacityReport
from fairlane.schema_registry import codec_for
from fairlane_server.cli.output import AsJson, BootstrapServers, settings_with, show_json, show_table
from fairlane_server.kafka.load_board import LoadBoard
from fairlane_server.kafka.load_feed import LoadFeed

_SETTLE_S = 0.6
"""Two heartbeats of every consumer."""
_COLUMNS = ("pool", "version", "consumer", "state", "reason")
_LOADED = "loaded"


def show_model_status(bootstrap_servers: BootstrapServers = None, *, as_json: AsJson = False) -> None:
    """Show which consumers have loaded which versions, and why versions are missing.

    From the consumers' heartbeats; a consumer without partitions sends none. A version that is missing is loading,
    waiting for its turn, changing (in the place of another one), without room (no_room), or failed.
    """
    settings = settings_with(kafka_bootstrap_servers=bootstrap_servers)
    board = LoadBoard()
    feed = LoadFeed(settings, codec_for(settings), board)
    try:
        feed.catch_up()
        feed.follow(_SETTLE_S)
    finally:
        feed.close()
    rows = sorted(row for report in board.consumers(now_ms()) for row in _rows(report))
    if as_json:
        show_json([dict(zip(_COLUMNS, row, strict=True)) for row in rows])
    else:
        show_table(_COLUMNS, [(*row[:-1], row[-1] or "-") for row in rows])


def _rows(report: CapacityReport) -> Iterator[tuple[str, str, str, str, str]]:
    for version in report.versions:
        yield report.pool, version, report.instance_id, _LOADED, ""
    for change in report.changes:
        yield report.pool, change.version, report.instance_id, change.state, change.reason
