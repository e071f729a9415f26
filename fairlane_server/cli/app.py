"""The commands, put together, and what every one of them does when something is wrong."""

import sys
from collections.abc import Sequence
from typing import NoReturn

import typer

from fairlane.schema_registry import RegistryError
from fairlane_server.cli import (
    access,
    anomalies,
    audit,
    budgets,
    collections,
    control,
    conversations,
    costs,
    db,
    dlq,
    drift,
    evaluate,
    evaluation,
    evaluation_schedules,
    evaluation_sets,
    explain,
    feedback,
    keys,
    labels,
    log_replays,
    model_registry,
    model_status,
    models,
    prices,
    rollouts,
    routes,
    schemas,
    sessions,
    shadows,
    top,
    topics,
)
from fairlane_server.cli.output import FAILURE, fail
from fairlane_server.kafka.cluster_admin import ClusterError
from fairlane_server.postgres.migrations import missing_extra
from fairlane_server.store_error import ReportableError
from fairlane_server.yaml_config import ConfigError

app = typer.Typer(
    name="fairlane",
    help="Operate a Fairlane deployment. Settings come from the environment; options override them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(topics.app, name="topics")
app.add_typer(access.app, name="access")
app.add_typer(control.tenants, name="tenants")
app.add_typer(models.models, name="models")
app.add_typer(routes.routes, name="routes")
app.add_typer(rollouts.rollouts, name="rollout")
app.add_typer(log_replays.app, name="replay")
app.add_typer(shadows.shadows, name="shadow")
app.add_typer(prices.prices, name="prices")
app.add_typer(schemas.app, name="schemas")
app.add_typer(db.app, name="db")
app.add_typer(dlq.app, name="dlq")
app.add_typer(collections.app, name="collections")
app.add_typer(conversations.app, name="conversations")
app.add_typer(drift.app, name="drift")
app.add_typer(feedback.app, name="feedback")
app.add_typer(labels.app, name="labels")
app.add_typer(evaluation.evaluation, name="evaluation")
evaluation.evaluation.add_typer(evaluation_sets.sets, name="set")
evaluation.evaluation.add_typer(evaluation_schedules.schedules, name="schedule")
evaluation.evaluation.add_typer(evaluation_schedules.judges, name="judge")
app.add_typer(keys.keys_app, name="keys")
app.add_typer(keys.users_app, name="users")
app.add_typer(sessions.app, name="sessions")
models.models.command("status")(model_status.show_model_status)
models.models.command("register")(model_registry.register_models)
models.models.command("sync")(model_registry.sync_models)
app.command("audit")(audit.audit_command)
app.command("anomalies")(anomalies.anomalies_command)
app.command("budgets")(budgets.budgets_command)
app.command("costs")(costs.costs_command)
app.command("evaluate")(evaluate.evaluate_command)
app.command("explain")(explain.explain_command)
app.command("top")(top.top_command)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command and exit: 0 done, 1 an error said in one line, 2 changes pending (``topics plan``).

    A wrong option exits 1 as well, so that 2 keeps its one meaning.
    """
    try:
        code = app(arguments, prog_name="fairlane", standalone_mode=False)
    except typer.Abort:
        fail("stopped")
    except typer.TyperException as error:
        message = error.format_message()
        if "\n" in message:  # a group without a command: its whole help
            typer.echo(message, err=True)
            sys.exit(FAILURE)
        fail(f"{message} (see --help)")
    except (ConfigError, ClusterError, RegistryError, ReportableError, OSError) as error:
        fail(str(error))
    except ImportError as error:
        fail(str(missing_extra(error)))
    sys.exit(code if isinstance(code, int) else 0)
