"""Hostile records and an honest neighbour, shared by the benchmark and the tests."""
