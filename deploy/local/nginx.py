"""NGINX with the configuration of ``deploy/nginx``, in front of gateways of this machine."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep

from deploy.local import probes
from deploy.local.certificates import Certificates
from deploy.local.layout import DEFAULT_DATA_DIR, PROJECT_ROOT, StackError
from deploy.local.supervisor import PROBE_INTERVAL_S, Instance, ProcessSpec, describe_exit

NAME = "nginx"
HOST = "127.0.0.1"
CONFIGURATION = PROJECT_ROOT / "deploy" / "nginx"
PROGRAM = DEFAULT_DATA_DIR / "nginx" / "nginx"


class NginxMissingError(StackError):
    """There is no NGINX."""


@dataclass(frozen=True, slots=True)
class Nginx:
    """The edge of a stack.

    Attributes:
        folder: its configuration, logs and buffered bodies.
        port: with TLS.
        gateways: their addresses, HOST:PORT.
        certificates: the server's, which callers verify.
        site: lines of site.conf besides port and certificate.
        listen: parameters of the port besides ``ssl`` and ``http2``.
        changes: text of nginx.conf, and what stands there instead.
    """

    folder: Path
    port: int
    gateways: Sequence[str]
    certificates: Certificates
    site: Sequence[str] = ()
    listen: str = ""
    changes: Mapping[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"https://{HOST}:{self.port}"

    @property
    def log_file(self) -> Path:
        """What it says of itself."""
        return self.folder / "nginx.log"

    @property
    def access_log(self) -> Path:
        """A line of JSON for each call."""
        return self.folder / "access.log"

    def spec(self) -> ProcessSpec:
        """The process. Raises NginxMissingError, with the remedy."""
        if not PROGRAM.exists():
            name = PROGRAM.relative_to(PROJECT_ROOT)
            raise NginxMissingError(f"{name} is missing: run `make nginx`, or set SKIP_NGINX=1 to leave the edge out")
        configuration = self.write()
        # As root its workers would become a user who may not enter the folder.
        as_root = ("-g", "user root;") if os.geteuid() == 0 else ()
        return ProcessSpec(
            name=NAME,
            argv=(str(PROGRAM), "-e", "stderr", "-p", str(self.folder), "-c", str(configuration), *as_root),
            cwd=self.folder,
        )

    def write(self) -> Path:
        """Write the configuration: the shipped one, with these addresses. Returns its main file."""
        self.folder.mkdir(parents=True, exist_ok=True)
        whole = _shipped("nginx.conf")
        for old, new in self.changes.items():
            if whole.count(old) != 1:
                raise ValueError(f"nginx.conf has {whole.count(old)} times {old!r}")
            whole = whole.replace(old, new)
        lists = re.sub(
            r"^( *server )\S+( .*;)$",
            lambda found: "\n".join(f"{found[1]}{address}{found[2]}" for address in self.gateways),
            _shipped("gateways.conf"),
            flags=re.MULTILINE,
        )
        pem = self.certificates.server_file
        site = (
            f"listen {HOST}:{self.port} ssl http2 {self.listen};",
            f"ssl_certificate {pem};",
            f"ssl_certificate_key {pem};",
            *self.site,
        )
        for name, text in (("nginx.conf", whole), ("gateways.conf", lists), ("site.conf", "\n".join(site))):
            (self.folder / name).write_text(text, encoding="utf-8")
        return self.folder / "nginx.conf"


@contextmanager
def running(nginx: Nginx) -> Iterator[Instance]:
    """Run it until the end of the block. Raises StackError if it does not listen in time."""
    spec = nginx.spec()
    instance = Instance(spec, nginx.log_file, {})
    try:
        deadline = monotonic() + spec.start_timeout_s
        while (problem := probes.tcp(HOST, nginx.port)) is not None:
            status = instance.collect()
            if status is not None or monotonic() > deadline:
                why = problem if status is None else describe_exit(status)
                raise StackError(f"{NAME}: {why}: {nginx.log_file.read_text(encoding='utf-8')[-1_000:]}")
            sleep(PROBE_INTERVAL_S)
        yield instance
    finally:
        instance.kill()
        while instance.collect() is None:
            sleep(PROBE_INTERVAL_S)


def _shipped(name: str) -> str:
    return (CONFIGURATION / name).read_text(encoding="utf-8")
