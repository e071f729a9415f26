"""Ingestion of the documents that tenants upload: a queue in Postgres, and the process that empties it."""
