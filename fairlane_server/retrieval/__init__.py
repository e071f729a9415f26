"""A tenant's documents: read, split into passages, embedded, stored and found again. Needs the extra ``retrieval``."""

from importlib.util import find_spec

from fairlane_server.store_error import ReportableError

_LIBRARIES = ("numpy", "psycopg", "semantic_text_splitter", "markdown_it", "markdownify", "bs4", "pypdf")


class MissingExtraError(ReportableError):
    """The extra ``retrieval`` is not installed."""


def require_extra() -> None:
    """Raises MissingExtraError when a library that ingestion needs is not there. Loads none of them."""
    for name in _LIBRARIES:
        if find_spec(name) is None:
            raise MissingExtraError(
                f"this needs the extra `retrieval`: pip install 'fairlane[retrieval]' ({name} is missing)"
            )
