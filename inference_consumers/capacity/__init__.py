"""Capacity: measured from runs, and reported to the dispatchers."""
