"""``fairlane models status``: which consumers have loaded which versions."""

from dataclasses import asdict

from fairlane.schema_registry import codec_for
from fairlane_server.administration.observer import Observer
from fairlane_server.cli.output import AsJson, BootstrapServers, settings_with, show_json, show_table

_COLUMNS = ("pool", "version", "consumer", "state", "reason")


def show_model_status(bootstrap_servers: BootstrapServers = None, *, as_json: AsJson = False) -> None:
    """Show which consumers have loaded which versions, and why versions are missing.

    From the consumers' heartbeats; a consumer without partitions sends none. A version that is missing is loading,
    waiting for its turn, changing (in the place of another one), without room (no_room), or failed.
    """
    settings = settings_with(kafka_bootstrap_servers=bootstrap_servers)
    with Observer(settings, codec_for(settings)) as observer:
        view, _ = observer.loads()
    rows = [asdict(row) for row in view.versions]
    if as_json:
        show_json(rows)
    else:
        show_table(_COLUMNS, [[row[column] or "-" for column in _COLUMNS] for row in rows])
