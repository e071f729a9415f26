"""Bounded reading of tenants' topics: batches, codecs and fetches that no tenant's bytes can make end or grow."""
