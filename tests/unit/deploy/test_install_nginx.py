"""How an NGINX comes to a machine without root: found, or fetched from Debian's package."""

import shutil
import subprocess
from pathlib import Path

import pytest

from deploy.local.layout import PROJECT_ROOT

SCRIPT = PROJECT_ROOT / "deploy" / "nginx" / "install.sh"
TOOLS = ("cat", "chmod", "dirname", "find", "grep", "ln", "mkdir", "paste", "rm", "sort", "touch")
REMEDY = "install nginx, or set SKIP_NGINX=1 to leave the edge out"

# Looked for there whatever the search path is.
fetches = pytest.mark.skipif(Path("/usr/sbin/nginx").exists(), reason="this machine has an nginx")


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A search path with the tools that every machine has."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found is not None, tool
        (folder / tool).symlink_to(found)
    return folder


def program(folder: Path, name: str, script: str) -> None:
    file = folder / name
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)


def install(target: Path, programs: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ("/bin/sh", str(SCRIPT), str(target)),
        env={"PATH": str(programs)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_an_nginx_of_the_machine_is_used(tmp_path: Path, programs: Path) -> None:
    program(programs, "nginx", "echo this one")
    assert install(tmp_path / "nginx", programs).returncode == 0
    assert (tmp_path / "nginx" / "nginx").samefile(programs / "nginx")


@fetches
@pytest.mark.parametrize("has_apt", [False, True])
def test_a_missing_nginx_is_named_in_one_line(tmp_path: Path, programs: Path, *, has_apt: bool) -> None:
    if has_apt:
        for name in ("apt-get", "dpkg"):
            program(programs, name, "exit 1")
    answer = install(tmp_path / "nginx", programs)
    assert answer.returncode == 1
    assert answer.stderr.startswith("fairlane: ")
    assert answer.stderr.endswith(f"{REMEDY}\n")
    assert len(answer.stderr.splitlines()) == 1
    assert not (tmp_path / "nginx" / "nginx").exists()


APT_GET = """
echo "$*" >> {folder}/asked
case "$*" in *update) touch {folder}/updated; exit;; esac
[ -e {folder}/updated ] || exit 1
while [ "$1" != download ]; do shift; done
shift
for name; do : > "$name.deb"; done
"""
"""Fetches what it is asked for, once it has lists."""
DPKG = """
name=${2##*/}
case "$name" in
nginx.deb)
    mkdir -p "$3/usr/sbin"
    printf '#!/bin/sh\\necho $LD_LIBRARY_PATH\\n' > "$3/usr/sbin/nginx"
    chmod +x "$3/usr/sbin/nginx";;
*) mkdir -p "$3/usr/lib/abi"; : > "$3/usr/lib/abi/${name%.deb}.so.1";;
esac
"""


@fetches
def test_the_package_is_unpacked_with_the_libraries_that_are_missing(tmp_path: Path, programs: Path) -> None:
    """By doubles of apt-get, dpkg and ldd; the machine has no package lists."""
    target = tmp_path / "nginx"
    program(programs, "apt-get", APT_GET.format(folder=tmp_path))
    program(programs, "dpkg", DPKG)
    program(programs, "ldd", "echo 'libssl.so.3 => not found'")
    done = install(target, programs)
    assert done.returncode == 0, done.stderr
    first, *others = (tmp_path / "asked").read_text().splitlines()
    assert first.endswith(" download nginx")
    assert str(target) not in first
    ends = ("update", "download nginx", "download libcrypt1 libpcre2-8-0 libssl3 zlib1g")
    for line, end in zip(others, ends, strict=True):
        assert line.endswith(f" {end}")
        assert f"Dir::State::Lists={target}/lists" in line
    found = subprocess.run((target / "nginx",), capture_output=True, text=True, timeout=30, check=True).stdout
    assert found.strip() == f"{target}/root/usr/lib/abi"
