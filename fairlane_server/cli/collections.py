"""``fairlane collections``: a tenant's documents, that requests of its are answered from."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from fairlane_server.cli.output import (
    FAILURE,
    AsJson,
    DryRun,
    Tenant,
    Yes,
    confirm,
    fail,
    printable,
    say,
    settings_with,
    show,
    show_json,
    show_list,
    utc,
    warn,
)
from fairlane_server.cli.progress import interruptible, progress_bar
from fairlane_server.retrieval import require_extra

if TYPE_CHECKING:
    from fairlane_server.retrieval.collections import Collections
    from fairlane_server.retrieval.ingestion import IngestOptions, IngestReport, Plan
    from fairlane_server.retrieval.sources import SkippedFile
    from fairlane_server.retrieval.store import Collection

Name = Annotated[str, typer.Argument(metavar="NAME", help="Of the collection.", show_default=False)]


@contextmanager
def opened(tenant: str, options: "IngestOptions | None" = None) -> "Iterator[Collections]":
    # The libraries of the extra are imported where they are used.
    require_extra()
    from fairlane_server.retrieval.collections import open_collections

    with open_collections(settings_with(), tenant, options) as collections:
        yield collections


_MOST_SHOWN = 20

Paths = Annotated[
    list[str],
    typer.Argument(metavar="PATH...", help="Files, folders (read recursively) and quoted globs.", show_default=False),
]
Prune = Annotated[bool, typer.Option("--prune", help="Remove the documents whose files are not in the folder.")]
MaxTokens = Annotated[int, typer.Option(metavar="N", min=16, max=8_192, help="Most tokens of a passage.")]
OverlapTokens = Annotated[
    int, typer.Option(metavar="N", min=0, help="Most tokens that a passage repeats of the one before it.")
]
FollowLinks = Annotated[
    bool, typer.Option("--follow-links", help="Take files and folders that links lead to outside of a given folder.")
]
MaxFileMb = Annotated[int, typer.Option(metavar="MB", min=1, max=1_000, help="A larger file is not taken.")]


def ingest_command(
    name: Name,
    paths: Paths,
    tenant: Tenant,
    max_tokens: MaxTokens = 200,
    overlap_tokens: OverlapTokens = 30,
    max_file_mb: MaxFileMb = 50,
    *,
    prune: Prune = False,
    follow_links: FollowLinks = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> int:
    """Ingest text, Markdown, HTML and PDF files into a collection. Unchanged files are skipped.

    A file that cannot be taken is named, and the others are taken; the exit status is 1 then. After Ctrl-C what was
    stored stays, and the same command goes on from there.
    """
    require_extra()
    options = _options(max_tokens, overlap_tokens, max_file_mb)
    from fairlane_server.retrieval.sources import find_sources

    with opened(tenant, options) as collections:
        ingestion = collections.ingestion(name)
        sources = find_sources(paths, follow_links=follow_links)
        with progress_bar("comparing", len(sources.files), as_json=as_json) as advance:
            plan = ingestion.plan(sources, prune=prune, progress=advance)
        if dry_run:
            _show_plan(plan, as_json=as_json)
            return FAILURE if plan.failures else 0
        with interruptible() as stop, progress_bar("ingesting", len(plan.due), as_json=as_json) as advance:
            report = ingestion.run(plan, progress=advance, stop=stop)
    _show_report(report, as_json=as_json)
    return FAILURE if report.failures or report.stopped else 0


def _options(max_tokens: int, overlap_tokens: int, max_file_mb: int) -> "IngestOptions":
    from fairlane_server.retrieval.chunking import Chunking
    from fairlane_server.retrieval.ingestion import IngestOptions
    from fairlane_server.retrieval.parsers import DocumentLimits

    try:
        chunking = Chunking(max_tokens, overlap_tokens)
    except ValueError as error:
        fail(f"--{str(error).replace('_', '-', 1)}")
    return IngestOptions(chunking, DocumentLimits(max_file_bytes=max_file_mb * 1_000_000))


def _show_plan(plan: "Plan", *, as_json: bool) -> None:
    if as_json:
        show_json(
            {
                "dry_run": True,
                "new": [file.source for file in plan.new],
                "changed": [file.source for file in plan.changed],
                "unchanged": plan.unchanged,
                "gone": list(plan.gone),
                "failures": [*map(asdict, plan.failures)],
                "left_out": [*map(asdict, plan.left_out)],
            }
        )
        return
    sources = {"new": [f.source for f in plan.new], "changed": [f.source for f in plan.changed], "gone": [*plan.gone]}
    for what, names in sources.items():
        _each([f"{what}: {printable(name)}" for name in names], say, what + ": and {:,} more")
    _warn_of(plan.failures)
    say(
        f"would store {len(plan.new):,} new and {len(plan.changed):,} changed documents, "
        f"remove {len(plan.gone):,}, leave {plan.unchanged:,} as they are"
        + _besides(len(plan.failures), len(plan.left_out))
    )


def _show_report(report: "IngestReport", *, as_json: bool) -> None:
    if as_json:
        show_json({"dry_run": False, **asdict(report), "passages_per_s": round(report.passages_per_s, 1)})
        return
    _warn_of(report.failures)
    say(
        ("stopped: " if report.stopped else "")
        + f"{report.new:,} new, {report.changed:,} changed, {report.unchanged:,} unchanged, {report.removed:,} removed"
        + _besides(len(report.failures), len(report.left_out))
        + (f", {report.left:,} left: the same command goes on" if report.stopped else "")
    )
    if report.passages:
        say(f"{report.passages:,} passages in {report.seconds:,.1f} s ({report.passages_per_s:,.0f} a second)")


def _besides(failures: int, left_out: int) -> str:
    failed = f", {failures:,} failed" if failures else ""
    return failed + (f"; {left_out:,} left out (hidden, unknown formats, links; --json names them)" if left_out else "")


def _each(lines: Sequence[str], write: Callable[[str], None], rest: str) -> None:
    """Some of the lines, and how many more there are of what ``rest`` names."""
    for line in lines[:_MOST_SHOWN]:
        write(line)
    if (more := len(lines) - _MOST_SHOWN) > 0:
        write(f"{rest.format(more)} (--json names them)")


def _warn_of(failures: "Sequence[SkippedFile]") -> None:
    lines = [f"{printable(failure.source)}: {printable(failure.reason)}" for failure in failures]
    _each(lines, warn, "and {:,} more files")


WithDocuments = Annotated[bool, typer.Option("--documents", help="Name the documents in it as well.")]

app = typer.Typer(help="The collections of documents that requests are answered from.", no_args_is_help=True)


@app.command("create")
def create_command(name: Name, tenant: Tenant, *, as_json: AsJson = False) -> None:
    """Create an empty collection of a tenant, for vectors of the embedder that RETRIEVAL_EMBEDDER names."""
    with opened(tenant) as collections:
        made = collections.create(name)
    text = f"created {made.name} of tenant {made.tenant}: {made.embedder}, {made.dimensions} dimensions"
    show(_as_json(made), text, as_json=as_json)


app.command("ingest")(ingest_command)


@app.command("list")
def list_command(tenant: Tenant, *, as_json: AsJson = False) -> None:
    """List the collections of a tenant."""
    with opened(tenant) as collections:
        found = collections.list()
    columns = ("collection", "documents", "passages", "version", "updated (UTC)", "embedder")
    empty = f"tenant {tenant} has no collections"
    show_list("collections", found, columns, _row, to_json=_as_json, empty=empty, as_json=as_json)


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
    say(f"created {utc(found.created_at_ms)} UTC, updated {utc(found.updated_at_ms)} UTC")
    for source in documents:
        say(f"  {printable(source)}")


@app.command("delete")
def delete_command(name: Name, tenant: Tenant, *, yes: Yes = False, as_json: AsJson = False) -> None:
    """Delete a collection with its documents and passages. What was cached of it is not found again."""
    with opened(tenant) as collections:
        found = collections.get(name)
        what = f"{found.name} of tenant {tenant} with {found.documents:,} documents and {found.passages:,} passages"
        confirm(f"Delete {what}?", yes=yes)
        gone = collections.delete(name)
    show({"deleted": _as_json(gone)}, f"deleted {what}", as_json=as_json)


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
        utc(collection.updated_at_ms),
        f"{collection.embedder} ({collection.dimensions})",
    )
