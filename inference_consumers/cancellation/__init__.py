"""Cancelled requests, and the feed that names them."""
