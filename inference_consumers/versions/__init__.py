"""Versions of a pool's models: which a consumer should have loaded, and how it changes them while it serves."""
