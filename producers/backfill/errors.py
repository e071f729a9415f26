"""Errors of offline jobs."""


class UnavailableError(Exception):
    """A dependency does not answer now; the same call may be repeated. The message is one line."""


class LeaseLostError(Exception):
    """Another runner has this job: nothing more may be done to it."""


class JobFailedError(Exception):
    """The job cannot continue. The message is one line for its owner and quotes no row."""


class NoSuchInputError(JobFailedError):
    """The input, or a column of it, does not exist or cannot be read in its format."""


class InputChangedError(JobFailedError):
    """The input has changed since the job was submitted."""
