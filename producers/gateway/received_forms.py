"""Uploads as forms or raw bodies: received to disk within a time, and what is wrong with one."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from errno import errorcode
from pathlib import Path
from tempfile import TemporaryFile

from starlette.datastructures import FormData
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request

from fairlane.logs import get_logger
from fairlane.outcomes import Code
from producers.openai_api.errors import GatewayError, client_gone

log = get_logger(__name__)

LENGTH_REQUIRED = "length_required"
"""The gateway's own code."""
MOST_FIELDS = 8
MOST_FIELD_BYTES = 1_024
MOST_FORM_BYTES = 16_384
"""Allowance for the body besides its file: the other fields, their headers and the boundaries. A form with more is not
rejected; until it is complete, its file then counts for more than its size."""


class SpoolingParser(MultiPartParser):
    """Multipart parser that writes the file to an unnamed file in ``folder``, which disappears with the process.

    Starlette's parser keeps the first MiB of a file in memory, and the rest in the system's temporary folder, which in
    a container may be memory too.
    """

    def __init__(self, request: Request, folder: Path) -> None:
        super().__init__(
            request.headers,
            request.stream(),
            max_files=1,
            max_fields=MOST_FIELDS,
            max_part_size=MOST_FIELD_BYTES,
        )
        self._folder = folder

    def on_headers_finished(self) -> None:
        super().on_headers_finished()
        upload = self._current_part.file
        if upload is not None:
            # Starlette's spool, still empty and in memory.
            upload.file.close()
            upload.file = TemporaryFile(dir=self._folder)  # noqa: SIM115 - the form closes it
            # Closed with the others if the rest of the form does not arrive.
            self._files_to_close_on_error.append(upload.file)  # type: ignore[arg-type]  # it closes them, no more


async def form_of(request: Request, folder: Path) -> FormData:
    """Parse the form; the caller must close it. Raises MultiPartException, ClientDisconnect, OSError and ValueError."""
    folder.mkdir(parents=True, exist_ok=True)
    return await SpoolingParser(request, folder).parse()


@asynccontextmanager
async def receiving(transfer_s: float, unavailable: Callable[[], GatewayError]) -> AsyncIterator[None]:
    """Bound the time of the block, which receives an upload, and report its failures. ``unavailable`` is the error for
    a folder that cannot be written to. Raises GatewayError."""
    try:
        async with asyncio.timeout(transfer_s):
            yield
    except ClientDisconnect:
        raise client_gone(None) from None
    except TimeoutError:
        message = f"the body took more than {transfer_s:g} s"
        raise GatewayError(408, Code.INVALID, message, field="body") from None
    except OSError as error:
        log.error("upload_not_spooled", error=errorcode.get(error.errno or 0, "unknown"))
        raise unavailable() from None
    except (MultiPartException, ValueError):
        # ValueError: a body may name any codec of Python as its charset, also one that decodes no text.
        raise no_form() from None


def no_form() -> GatewayError:
    """400: the body is not a form with a file."""
    return GatewayError(400, Code.INVALID, "file: the body is no form with a file", field="file")


def no_length() -> GatewayError:
    """411: the call has no Content-Length, for which quota is reserved."""
    return GatewayError(411, LENGTH_REQUIRED, "the length of the body must be given", field="content-length")
