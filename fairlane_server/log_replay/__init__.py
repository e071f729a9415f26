"""Replays of the log: a sample of admitted work runs again on a candidate, and on the version that answered it."""
