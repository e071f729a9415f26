"""``fairlane routes``: the rules that divide the requests for a model among its versions."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fairlane.records import ModelRoute, RouteRule
from fairlane.schema_registry import codec_for
from fairlane_server.cli.models import Reason, author_of
from fairlane_server.cli.output import CHANGES_PENDING, AsJson, BootstrapServers, fail, settings_with, show_list, utc
from fairlane_server.control.published_models import model_topic
from fairlane_server.control.route_change import model_changes
from fairlane_server.models.catalog import ModelRecord
from fairlane_server.models.changes import Author, Published, moved_versions, route_of, with_rules
from fairlane_server.models.rules_file import load_rules

routes = typer.Typer(help="The rules that divide requests among the versions of a model.", no_args_is_help=True)

RulesFile = Annotated[Path, typer.Argument(metavar="FILE", help="Rules, see docs/model-versions.md.")]


@routes.command("plan")
def plan_routes(file: RulesFile, bootstrap_servers: BootstrapServers = None, *, as_json: AsJson = False) -> None:
    """Show what `apply` would change. Exits 2 if it would change something."""
    settings = settings_with(kafka_bootstrap_servers=bootstrap_servers)
    published = model_topic(settings, codec_for(settings)).read()
    made = _routes_with(load_rules(file), published, author_of(""))
    _show_rules(made, as_json=as_json)
    raise typer.Exit(CHANGES_PENDING if made else 0)


@routes.command("apply")
def apply_routes(
    file: RulesFile, reason: Reason = "", bootstrap_servers: BootstrapServers = None, *, as_json: AsJson = False
) -> None:
    """Publish the rules of a file for the models in it; of other models they stay. May be repeated.

    The file is refused as a whole when a rule of it names an unknown version or alias or its percentages are not 100.
    """
    settings = settings_with(kafka_bootstrap_servers=bootstrap_servers)
    rules, author = load_rules(file), author_of(reason)
    made: list[ModelRoute] = []

    def decided(published: Published) -> tuple[list[ModelRecord], tuple[str, ...]]:
        made[:] = _routes_with(rules, published, author)
        moved = [version for route in made for version in moved_versions(published, route.model).values()]
        return [*moved, *made], ()

    model_changes(settings).make(model_topic(settings, codec_for(settings)), decided)
    _show_rules(made, as_json=as_json)


def _routes_with(rules: Mapping[str, tuple[RouteRule, ...]], published: Published, author: Author) -> list[ModelRoute]:
    """The routes that these rules change. Ends the command when one is not valid."""
    made: list[ModelRoute] = []
    for model, of_model in rules.items():
        try:
            route = with_rules(published, model, of_model, author)
        except ValueError as error:
            fail(f"{model}: {error}")
        if route != route_of(published, model):
            made.append(route)
    return made


def _show_rules(changed: list[ModelRoute], *, as_json: bool) -> None:
    show_list(
        "routes",
        changed,
        ("model", "revision", "rule", "arms", "for"),
        lambda route: (
            route.model,
            str(route.revision),
            "\n".join(rule.rule for rule in route.rules) or "none",
            "\n".join(_arms(rule) for rule in route.rules),
            "\n".join(_conditions(rule) for rule in route.rules),
        ),
        to_json=asdict,
        empty="nothing to change",
        as_json=as_json,
    )


def _arms(rule: RouteRule) -> str:
    return ", ".join(f"{arm.arm} {arm.target} {arm.percent:g} %" for arm in rule.arms)


def _conditions(rule: RouteRule) -> str:
    named = [*rule.tenants, *rule.callers, *rule.tasks]
    times = [f"{name} {utc(at_ms)}" for name, at_ms in (("from", rule.from_ms), ("until", rule.until_ms)) if at_ms]
    return ", ".join([*named, *times]) or "all"
