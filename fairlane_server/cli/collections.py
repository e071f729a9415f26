"""``fairlane collections``: a tenant's documents, that requests of its are answered from."""

from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from fairlane_server.cli.collections_ingest import ingest_command
from fairlane_server.cli.collections_options import Name, Tenant, opened
from fairlane_server.cli.options import AsJson
from fairlane_server.cli.output import printable, say, show_json, show_table

if TYPE_CHECKING:
    from fairlane_server.retrieval.store import Collection

Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
WithDocuments = Annotated[bool, typer.Option("--documents", help="Name the documents in it as well.")]

app = typer.Typer(help="The collections of documents that requests are answered from.", no_args_is_help=True)


@app.command("create")
def create_command(name: Name, tenant: Tenant, *, as_json: AsJson = False) -> None:
    """Create an empty collection of a tenant, for vectors of the embedder that RETRIEVAL_EMBEDDER names."""
    with opened(tenant) as collections:
        made = collections.create(name)
    if as_json:
        show_json(_as_json(made))
    else:
        say(f"created {made.name} of tenant {made.tenant}: {made.embedder}, {made.dimensions} dimensions")


app.command("ingest")(ingest_command)


@app.command("list")
def list_command(tenant: Tenant, *, as_json: AsJson = False) -> None:
    """List the collections of a tenant."""
    with opened(tenant) as collections:
        found = collections.list()
    if as_json:
        show_json({"collections": [*map(_as_json, found)]})
    elif not found:
        say(f"tenant {tenant} has no collections")
    else:
        show_table(("collection", "documents", "passages", "version", "updated (UTC)", "embedder"), [*map(_row, found)])


@app.command("show")
def show_command(name: Name, tenant: Tenant, *, with_documents: WithDocuments = False, as_json: AsJson = False) -> None:
    """Show one collection."""
    with opened(tenant) as collections:
        found = collections.get(name)
        documents = collections.documents(name) if with_documents else []
    if as_json:
        show_json({**_as_json(found), **({"sources": list(documents)} if with_documents else {})})
        return
    say(f"{found.name} of tenant {found.tenant}, version {found.version}")
    say(f"{found.documents:,} documents, {found.passages:,} passages")
    say(f"embedded by {printable(found.embedder)}, {found.dimensions} dimensions")
    say(f"created {_time(found.created_at_ms)} UTC, updated {_time(found.updated_at_ms)} UTC")
    for source in documents:
        say(f"  {printable(source)}")


@app.command("delete")
def delete_command(name: Name, tenant: Tenant, *, yes: Yes = False, as_json: AsJson = False) -> None:
    """Delete a collection with its documents and passages. What was cached of it is not found again."""
    with opened(tenant) as collections:
        found = collections.get(name)
        what = f"{found.name} of tenant {tenant} with {found.documents:,} documents and {found.passages:,} passages"
        if not yes:
            typer.confirm(f"Delete {what}?", abort=True, err=True)
        gone = collections.delete(name)
    if as_json:
        show_json({"deleted": _as_json(gone)})
    else:
        say(f"deleted {what}")


def _as_json(collection: "Collection") -> dict[str, object]:
    values = asdict(collection)
    # The store's own name for it.
    del values["number"]
    return values


def _row(collection: "Collection") -> tuple[str, ...]:
    return (
        collection.name,
        f"{collection.documents:,}",
        f"{collection.passages:,}",
        str(collection.version),
        _time(collection.updated_at_ms),
        f"{collection.embedder} ({collection.dimensions})",
    )


def _time(at_ms: int) -> str:
    return f"{datetime.fromtimestamp(at_ms / 1_000, UTC):%Y-%m-%d %H:%M:%S}"
