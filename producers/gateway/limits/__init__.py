"""Rate limits of calls, by key, user and tenant."""
