"""Multipart form of an upload; its file is spooled to a chosen volume."""

from pathlib import Path
from tempfile import TemporaryFile

from starlette.datastructures import FormData
from starlette.formparsers import MultiPartParser
from starlette.requests import Request

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
