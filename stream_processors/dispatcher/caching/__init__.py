"""Caches of answers, passages and query vectors: in Redis, keyed by tenant first, with a hot tier in memory.

Caches are optional: an entry that is missing, late, damaged or another tenant's is a miss.
"""
