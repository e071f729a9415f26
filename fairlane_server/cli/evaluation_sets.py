"""``fairlane evaluation set``: the stored evaluation sets of a tenant."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fairlane_server.cli.evaluation import SetArgument, opened
from fairlane_server.cli.output import AsJson, Tenant, Yes, confirm, fail, say, show, show_json, show_list, utc
from fairlane_server.command_author import command_author
from fairlane_server.private_files import write_private

if TYPE_CHECKING:
    from fairlane_server.evaluation.set_store import StoredSet

sets = typer.Typer(help="The stored evaluation sets of a tenant: immutable versions.", no_args_is_help=True)

SetName = Annotated[str, typer.Argument(metavar="NAME", help="The name of the set.", show_default=False)]


@sets.command("add")
def add_set(
    name: SetName,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The set, as JSON Lines; see docs/evaluation.md.")],
    tenant: Tenant,
    *,
    as_json: AsJson = False,
) -> None:
    """Store a set as the next version of this name. The same content again changes nothing."""
    from fairlane_server.evaluation.evaluation_set import EvaluationSetError, read_evaluation_set

    try:
        with file.open("rb") as lines:
            examples = read_evaluation_set(lines)
    except EvaluationSetError as error:
        fail(f"{file}: {error}")
    with opened(tenant) as measuring:
        stored, is_new = measuring.sets.add(name, examples, command_author())
    text = f"{_reference(stored)}: {stored.present} examples, digest {stored.digest[:16]}"
    show({"set": asdict(stored), "new": is_new}, text + ("" if is_new else "; it was there"), as_json=as_json)


@sets.command("list")
def list_sets(
    tenant: Tenant,
    name: Annotated[str | None, typer.Option("--name", metavar="NAME", help="Only versions of this set.")] = None,
    *,
    as_json: AsJson = False,
) -> None:
    """List the versions of the sets."""
    with opened(tenant) as measuring:
        found = measuring.sets.list(name)
    show_list(
        *("sets", found, ("set", "examples", "of requests", "bytes", "digest", "since (UTC)", "by"), _row),
        to_json=asdict,
        empty="no set is stored",
        as_json=as_json,
    )


@sets.command("show")
def show_set(
    evaluation_set: SetArgument,
    tenant: Tenant,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Write the examples there, readable by their owner alone."),
    ] = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Show a version of a set, without its texts; the latest without a number."""
    from fairlane_server.evaluation.set_store import set_reference

    with opened(tenant) as measuring:
        stored = measuring.sets.find(*set_reference(evaluation_set))
        lines = [] if out is None else measuring.sets.lines(stored.name, stored.version)
    if out is not None:
        write_private(out, "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for _, line in lines))
    if as_json:
        show_json({"set": asdict(stored)})
        return
    gone = stored.examples - stored.present
    say(f"{_reference(stored)}: {stored.present} examples, {stored.labelled} of requests, digest {stored.digest}")
    say(f"{utc(stored.created_at_ms)} UTC by {stored.created_by}" + (f"; {gone} were erased" if gone else ""))


@sets.command("remove")
def remove_set(
    name: SetName,
    version: Annotated[int, typer.Argument(metavar="VERSION", help="The version.", show_default=False)],
    tenant: Tenant,
    *,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Delete the examples of a version. Runs on it keep their scores."""
    confirm(f"delete the examples of {name}:{version} of {tenant}?", yes=yes)
    with opened(tenant) as measuring:
        measuring.sets.remove(name, version)
    show({"removed": {"name": name, "version": version}}, f"{name}:{version} is removed", as_json=as_json)


def _reference(stored: "StoredSet") -> str:
    return f"{stored.name}:{stored.version}"


def _row(stored: "StoredSet") -> tuple[str, ...]:
    return (
        *(_reference(stored), str(stored.present), str(stored.labelled), str(stored.size_bytes), stored.digest[:16]),
        *(utc(stored.created_at_ms), stored.created_by),
    )
