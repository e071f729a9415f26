"""Base errors: of everything that the command line prints as one line, and of all stores."""


class ReportableError(Exception):
    """The message is one line without secrets: the command line prints it and ends."""


class StoreError(ReportableError):
    """A store operation failed. The message is one line and quotes no stored data."""
