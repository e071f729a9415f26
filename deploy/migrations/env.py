"""Alembic's environment: one transaction for all revisions, one process at a time.

Run by ``fairlane db upgrade``, which brings the connection and the name of the services' role.
"""

from alembic import context
from alembic.util.exc import CommandError
from sqlalchemy import text

# Any number that no other program on the same database takes.
UPGRADE_LOCK = 4_602_678_819
LOCK_TIMEOUT = "60s"


def run() -> None:
    """Apply the revisions that are missing."""
    attributes = context.config.attributes
    if "connection" not in attributes:
        raise CommandError("these migrations are run by `fairlane db upgrade`")
    connection = attributes["connection"]
    context.configure(
        connection=connection,
        on_version_apply=lambda *, step, **_: attributes["applied"].append(step.up_revision_id),
    )
    with context.begin_transaction():
        # Before the first look at the version table: whoever waits here finds the other's work done.
        connection.execute(text(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'"))
        connection.execute(text(f"SELECT pg_advisory_xact_lock({UPGRADE_LOCK})"))
        context.run_migrations(service_role=attributes["service_role"])
    connection.commit()


run()
