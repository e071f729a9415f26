"""What became of requests: from the replies seen here, from Redis for a while, from Postgres after that."""
