"""Postgres: connections, migrations, the gateway's rights, and the history of requests."""
