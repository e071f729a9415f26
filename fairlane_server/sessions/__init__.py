"""Sessions of browsers: the record, and its store in Redis, with the logins that are under way."""
