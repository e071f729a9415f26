"""Intervals and expiry of heartbeats, shared by senders and readers."""

CAPACITY_TTL_MS = 3_000
"""How long a consumer's report counts, from when it was received. It sends one every 250 ms."""

LEAST_OUTAGE_MS = 10_000
"""A pool that has just lost its consumers is not expected back sooner: one needs that long to restart and load."""
