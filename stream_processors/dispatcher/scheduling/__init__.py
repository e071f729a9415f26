"""Scheduling: fair queue, dispatch window, in-flight tracking."""
