"""Base error of all stores."""


class StoreError(Exception):
    """A store operation failed. The message is one line and quotes no stored data."""
