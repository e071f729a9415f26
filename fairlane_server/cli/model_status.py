"""``fairlane models status``: which consumers have loaded which versions."""

from dataclasses import asdict

from fairlane.clock import now_ms
from fairlane.schema_registry import codec_for
from fairlane_server.cli.output import AsJson, BootstrapServers, settings_with, show_json, show_table
from fairlane_server.kafka.load_board import LoadBoard
from fairlane_server.kafka.load_feed import LoadFeed

_SETTLE_S = 0.6
"""Two heartbeats of every consumer."""
_COLUMNS = ("pool", "version", "consumer", "state", "reason")


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
    rows = [asdict(row) for row in board.view(now_ms()).versions]
    if as_json:
        show_json(rows)
    else:
        show_table(_COLUMNS, [[row[column] or "-" for column in _COLUMNS] for row in rows])
