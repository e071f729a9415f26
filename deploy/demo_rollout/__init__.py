"""A rollout that is taken back and one that is promoted, on a stack of its own."""
