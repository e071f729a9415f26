"""Feedback: what was dispatched, what it cost, and what the pools can do, read back from the log."""
