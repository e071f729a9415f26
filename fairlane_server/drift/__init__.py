"""Drift: whether the requests and answers of a tenant and a model are still distributed as they were. Pure."""
