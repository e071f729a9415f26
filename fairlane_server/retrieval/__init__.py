"""A tenant's documents: read, split into passages, embedded, stored and found again.

What a client needs stays outside: this package comes with the extra ``retrieval``.
"""
