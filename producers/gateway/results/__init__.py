"""Status and replies of requests: from memory, then Redis, then Postgres."""
