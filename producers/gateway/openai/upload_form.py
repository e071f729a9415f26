"""The form of an upload, whose file goes to a volume of our choice as it comes."""

from pathlib import Path
from tempfile import TemporaryFile

from starlette.datastructures import FormData
from starlette.formparsers import MultiPartParser
from starlette.requests import Request

MOST_FIELDS = 8
MOST_FIELD_BYTES = 1_024
MOST_FORM_BYTES = 16_384
"""Of a body beside its file: the other fields with their heads, and what is between them. A form that has more than
that is not refused, but its file counts for less until it is whole."""


class SpoolingParser(MultiPartParser):
    """Starlette's keeps the first MiB of a file in memory, and the rest in the system's folder for temporary files,
    which in a container may be memory too. Here all of it goes to a file without a name in ``folder``, which is gone
    with its process."""

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
            # In memory, and empty.
            upload.file.close()
            upload.file = TemporaryFile(dir=self._folder)  # noqa: SIM115 - the form closes it
            # Closed with the others when the rest of the form does not come.
            self._files_to_close_on_error.append(upload.file)  # type: ignore[arg-type]  # it closes them, no more


async def form_of(request: Request, folder: Path) -> FormData:
    """The whole form; close it. Raises MultiPartException, ClientDisconnect, OSError and ValueError."""
    folder.mkdir(parents=True, exist_ok=True)
    return await SpoolingParser(request, folder).parse()
