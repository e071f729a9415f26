"""A Postgres of some tests' own, that they may stop."""

from pathlib import Path

from tests.kit.own_part import OwnPart
from tests.kit.stack import PostgresServer


class OwnPostgres(OwnPart):
    """Without tables."""

    def __init__(self, folder: Path) -> None:
        super().__init__("postgres", folder)

    @property
    def server(self) -> PostgresServer:
        """How it is reached."""
        return PostgresServer.of(self.endpoints)
