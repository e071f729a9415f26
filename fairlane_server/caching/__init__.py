"""Caching: keys, sealed entries, and responses that may be given again."""
