"""What the commands of ``fairlane collections`` share: their options, and how they speak of what went wrong."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from fairlane.names import is_name
from fairlane_server.cli.options import settings_with
from fairlane_server.cli.output import fail, printable

if TYPE_CHECKING:
    from fairlane_server.retrieval.collections import Collections
    from fairlane_server.retrieval.ingestion import IngestOptions

Name = Annotated[str, typer.Argument(metavar="NAME", help="Of the collection.", show_default=False)]
Tenant = Annotated[str, typer.Option("--tenant", metavar="TENANT", help="Whose collection it is.", show_default=False)]


@contextmanager
def opened(tenant: str, options: "IngestOptions | None" = None) -> "Iterator[Collections]":
    """The tenant's collections; ends the command with one line for every error that is somebody's to mend."""
    if not is_name(tenant):
        fail(f"--tenant {printable(tenant)}: no tenant can have this name")
    needs_extra()
    from fairlane_server.retrieval.collections import open_collections
    from fairlane_server.retrieval.embedder import EmbedderError
    from fairlane_server.retrieval.ingestion import IngestError
    from fairlane_server.retrieval.sources import SourcesError
    from fairlane_server.store_error import StoreError

    try:
        with open_collections(settings_with(), tenant, options) as collections:
            yield collections
    except (StoreError, EmbedderError, SourcesError, IngestError, ValueError) as error:
        fail(printable(str(error)))


def needs_extra() -> None:
    """Ends the command when the libraries it needs are not installed. They are loaded where they are used."""
    from fairlane_server.retrieval.extra import MissingExtraError, require_extra

    try:
        require_extra()
    except MissingExtraError as error:
        fail(str(error))
