"""The embedded stack: real Kafka, Postgres and Redis with no Docker and no root, under one supervisor."""
