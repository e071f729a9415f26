"""Redis: sealed cache entries, token buckets, the store of state, and whether it answers."""
