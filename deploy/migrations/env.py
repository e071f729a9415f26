"""Alembic's environment: one transaction for all revisions and for the rights of the roles, one process at a time.

Run by ``fairlane db upgrade``, which brings the connection and the prefix of the roles' names.
"""

from alembic import context
from alembic.util.exc import CommandError
from sqlalchemy import text

from fairlane_server.postgres.grants import apply_rights

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
        context.run_migrations()
        # The rights are on the tables of the newest revision.
        if context.get_context().get_current_revision() == context.get_head_revision():
            attributes["rights"] = apply_rights(connection.connection.driver_connection, attributes["role_prefix"])
    connection.commit()


run()
