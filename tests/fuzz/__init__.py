"""A fuzzer for everything that tenants and strangers may send: ``python -m tests.fuzz --seconds 600``."""
