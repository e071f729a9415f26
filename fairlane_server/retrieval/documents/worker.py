"""The parser process; ``parser_process`` runs it as ``python -m fairlane_server.retrieval.documents.worker FD LIMITS``.

A document comes as two messages (format, bytes) and is answered by one of JSON: its text and title, or why not. What a
document does to this process (memory, an endless loop, a crash in C) ends here.
"""

import json
import logging
import resource
import signal
import sys
import warnings
from contextlib import suppress
from multiprocessing.connection import Connection

from fairlane_server.processes.parent import die_with_parent
from fairlane_server.retrieval.documents.document import (
    MOST_TITLE_CHARACTERS,
    DocumentLimits,
    Format,
    ParsedDocument,
    UnreadableError,
)
from fairlane_server.retrieval.documents.parsers import parse_html, parse_pdf

READY = b"ready"
_RECURSION_LIMIT = 10_000
"""Pages of tables in tables are nested more deeply than Python's own limit lets a parser follow."""


def answer(kind: str, data: bytes, limits: DocumentLimits) -> dict[str, str]:
    """``text`` and ``title`` of a document, or the ``reason`` why it cannot be had."""
    parse = parse_pdf if kind == Format.PDF else parse_html
    try:
        parsed: ParsedDocument = parse(data, limits)
    except UnreadableError as error:
        return {"reason": str(error)}
    except MemoryError:
        return {"reason": f"needs more memory to parse than a document may ({limits.max_parser_bytes >> 20:,} MiB)"}
    except Exception as error:  # noqa: BLE001 - a parser may raise anything, and the next document is still to come
        return {"reason": f"made its parser fail ({type(error).__name__})"}
    return {"text": parsed.text, "title": parsed.title[:MOST_TITLE_CHARACTERS]}


def main() -> None:
    """Serve until the other side hangs up."""
    die_with_parent(signal.SIGKILL)
    connection, limits = Connection(int(sys.argv[1])), DocumentLimits(**json.loads(sys.argv[2]))
    resource.setrlimit(resource.RLIMIT_AS, (limits.max_parser_bytes, limits.max_parser_bytes))
    sys.setrecursionlimit(_RECURSION_LIMIT)
    # What they say about a document may quote it.
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        connection.send_bytes(READY)
        while True:
            kind = connection.recv_bytes().decode()
            connection.send_bytes(json.dumps(answer(kind, connection.recv_bytes(), limits)).encode())


if __name__ == "__main__":
    main()
