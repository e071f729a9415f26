"""Processes of checks, one for each check in use: what crashes or hangs there never takes the consumer along."""
