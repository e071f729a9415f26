"""Deduplication: request ids accepted before, and what their senders get."""
