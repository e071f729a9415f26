"""Hostile records, and an honest tenant beside who sends them; shared by the benchmark and the tests."""
