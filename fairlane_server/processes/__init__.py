"""Processes: life, restarts, parents and watchdogs."""
