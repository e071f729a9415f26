"""Postgres with pgvector: a role that owns the tables, and one for each service."""

import json
import os
import pwd
import secrets
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import psycopg
from psycopg import sql

from deploy.local import probes
from deploy.local.certificates import Certificates
from deploy.local.layout import StackError
from deploy.local.postgres_server import find_binaries
from deploy.local.run_record import processes_in
from deploy.local.supervisor import ProcessSpec, RunAs
from fairlane_server.postgres.rights import PostgresRole
from fairlane_server.private_files import write_private

NAME = "postgres"
INIT_NAME = "postgres-initdb"
HOST = "127.0.0.1"
DATABASE = "fairlane"
ADMIN_ROLE = "postgres"
OWNER_ROLE = "fairlane_owner"
SERVICE_ROLES = tuple(role.name_in() for role in PostgresRole)
ROLES = (ADMIN_ROLE, OWNER_ROLE, *SERVICE_ROLES)
UNPRIVILEGED_USER = "nobody"
MAX_SOCKET_PATH = 100
BEGIN_CERTIFICATE = "-----BEGIN CERTIFICATE-----"

SERVER_SETTINGS: Mapping[str, str] = {
    "listen_addresses": HOST,
    "max_connections": "100",
    "shared_buffers": "64MB",
    "password_encryption": "scram-sha-256",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "logging_collector": "off",
}


@dataclass(frozen=True, slots=True)
class Postgres:
    """The Postgres server of one stack.

    Attributes:
        folder: its cluster (in `data`) and the file with the passwords.
        certificates: it serves TLS alone, with these; None: no TLS.
    """

    folder: Path
    port: int
    certificates: Certificates | None = None

    @property
    def data(self) -> Path:
        """The working directory of the server and its workers."""
        return self.folder / "data"

    @property
    def passwords_file(self) -> Path:
        """The generated passwords of the roles, readable by its owner only."""
        return self.folder / "passwords.json"

    def dsn(self, role: str) -> str:
        """How `role` connects; holds its password. Raises StackError: the file with the passwords cannot be read."""
        return self._dsn(role, DATABASE)

    def prepare(self) -> None:
        """Create the folder and the passwords, unless they are there."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.passwords_file.exists():
            if (self.data / "PG_VERSION").exists():
                raise StackError(f"{self.passwords_file} is missing: restore it, or remove {self.folder} to start anew")
            write_private(self.passwords_file, json.dumps({role: secrets.token_urlsafe(24) for role in ROLES}))
        passwords = self._passwords()
        if missing := [role for role in ROLES if role not in passwords]:
            # The folder is of a version that had fewer roles.
            passwords |= {role: secrets.token_urlsafe(24) for role in missing}
            write_private(self.passwords_file, json.dumps(passwords))

    def specs(self) -> tuple[ProcessSpec, ...]:
        """Say what to run: initdb, for a new folder only, then the server. Raises StackError: Postgres is not
        installed."""
        self.prepare()
        binaries = find_binaries()
        run_as = _run_as()
        if run_as is not None:
            os.chown(self.folder, run_as.uid, run_as.gid)
        socket_folder = str(self.folder) if len(f"{self.folder}/.s.PGSQL.{self.port}") <= MAX_SOCKET_PATH else ""
        settings = {**SERVER_SETTINGS, "port": str(self.port), "unix_socket_directories": socket_folder}
        if self.certificates is not None:
            settings |= self._tls_settings(self.certificates, run_as)
        new = not (self.data / "PG_VERSION").exists()
        server = ProcessSpec(
            name=NAME,
            argv=(
                *(str(binaries / "postgres"), "-D", str(self.data)),
                *(part for name, value in settings.items() for part in ("-c", f"{name}={value}")),
            ),
            env={"LC_ALL": "C"},
            cwd=self.folder,
            depends_on=(INIT_NAME,) if new else (),
            probe=self._probe,
            stop_signal=signal.SIGINT,  # ends the sessions of clients; SIGTERM would wait for them
            death_signal=signal.SIGQUIT,  # at once, but the workers and shared memory go too
            run_as=run_as,
            before_start=self._remove_stale_pid,
        )
        return (self._initdb(binaries, run_as), server) if new else (server,)

    def _initdb(self, binaries: Path, run_as: RunAs | None) -> ProcessSpec:
        draft, password_file = self.folder / "data.new", self.folder / "admin-password"
        _write_as(run_as, password_file, self._passwords()[ADMIN_ROLE])
        initdb = (
            *(str(binaries / "initdb"), "-D", str(draft), "-U", ADMIN_ROLE, f"--pwfile={password_file}"),
            *("--auth=scram-sha-256", "--encoding=UTF8", "--no-instructions"),
            *("--locale=C", "--locale-provider=builtin", "--builtin-locale=C.UTF-8"),
        )
        # Moved into place at the end, so that a cluster half made by a killed run is made anew.
        script = (
            'draft="$1"; data="$2"; password="$3"; shift 3; '
            'rm -rf "$draft" && "$@" && rm "$password" && mv "$draft" "$data"'
        )
        return ProcessSpec(
            name=INIT_NAME,
            argv=("/bin/sh", "-c", script, "sh", str(draft), str(self.data), str(password_file), *initdb),
            env={"LC_ALL": "C"},
            cwd=self.folder,
            one_shot=True,
            run_as=run_as,
        )

    def _tls_settings(self, certificates: Certificates, run_as: RunAs | None) -> Mapping[str, str]:
        """Settings for connections with TLS alone; writes the files that they name."""
        files = {name: self.folder / name for name in ("server.key", "server.crt", "pg_hba.conf")}
        key, begin, chain = certificates.server_file.read_text(encoding="utf-8").partition(BEGIN_CERTIFICATE)
        # Postgres refuses a key that is not its own user's.
        _write_as(run_as, files["server.key"], key)
        _write_as(run_as, files["server.crt"], begin + chain)
        _write_as(run_as, files["pg_hba.conf"], f"hostssl all all {HOST}/32 scram-sha-256\n")
        return {
            "ssl": "on",
            "ssl_key_file": str(files["server.key"]),
            "ssl_cert_file": str(files["server.crt"]),
            "hba_file": str(files["pg_hba.conf"]),
            "unix_socket_directories": "",
        }

    def _probe(self) -> str | None:
        """Ready when it accepts connections and has its roles; they are made here, the first time it answers."""
        admin_dsn = self._dsn(ADMIN_ROLE, "postgres")
        if (problem := probes.tcp(HOST, self.port)) or (problem := probes.postgres(admin_dsn)):
            return problem
        try:
            create_roles(admin_dsn, self._passwords())
        except psycopg.Error as error:
            return str(error).strip()
        return None

    def _remove_stale_pid(self) -> None:
        """Remove a crashed server's postmaster.pid: with its pid in use again by whatever process, no server starts."""
        if not any(processes_in(self.data)):
            (self.data / "postmaster.pid").unlink(missing_ok=True)

    def _dsn(self, role: str, database: str) -> str:
        address = f"postgresql://{role}:{self._passwords()[role]}@{HOST}:{self.port}/{database}"
        if self.certificates is None:
            return address
        return f"{address}?sslmode=verify-full&sslrootcert={quote(str(self.certificates.ca_file), safe='')}"

    def _passwords(self) -> dict[str, str]:
        try:
            passwords: dict[str, str] = json.loads(self.passwords_file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise StackError(f"{self.passwords_file} cannot be read: {type(error).__name__}") from None
        return passwords


def create_roles(admin_dsn: str, passwords: Mapping[str, str]) -> None:
    """Create the database, its owner, the services' roles and the vector extension, unless they are there.

    No role is a superuser or can bypass row-level security. The owner may create databases, each with the extension,
    for tests. ``admin_dsn``: of a superuser, to any database but ours.
    """
    with psycopg.connect(admin_dsn, autocommit=True, connect_timeout=5) as connection:
        for role, rights in ((OWNER_ROLE, "CREATEDB"), *((role, "NOCREATEDB") for role in SERVICE_ROLES)):
            known = connection.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", (role,)).fetchone()
            # The hash is made here: the password itself never travels, nor does it get into the server's log.
            verifier = connection.pgconn.encrypt_password(passwords[role].encode(), role.encode(), b"scram-sha-256")
            connection.execute(
                sql.SQL(
                    "{verb} ROLE {role} LOGIN NOSUPERUSER NOBYPASSRLS NOCREATEROLE {rights} PASSWORD {verifier}"
                ).format(
                    verb=sql.SQL("ALTER" if known else "CREATE"),
                    role=sql.Identifier(role),
                    rights=sql.SQL(rights),
                    verifier=sql.Literal(verifier.decode()),
                )
            )
        if not connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", (DATABASE,)).fetchone():
            with psycopg.connect(admin_dsn, dbname="template1", autocommit=True, connect_timeout=5) as template:
                template.execute("CREATE EXTENSION IF NOT EXISTS vector")
            connection.execute(
                sql.SQL("CREATE DATABASE {} OWNER {}").format(sql.Identifier(DATABASE), sql.Identifier(OWNER_ROLE))
            )


def _write_as(run_as: RunAs | None, file: Path, text: str) -> None:
    """Write a file that the server alone can read."""
    write_private(file, text)
    if run_as is not None:
        os.chown(file, run_as.uid, run_as.gid)


def _run_as() -> RunAs | None:
    """Postgres refuses to run as root; under root it runs as the user that exists everywhere and owns nothing."""
    if os.geteuid() != 0:
        return None
    try:
        entry = pwd.getpwnam(UNPRIVILEGED_USER)
    except KeyError:
        raise StackError(
            f"Postgres does not run as root and there is no user {UNPRIVILEGED_USER}: run as an ordinary user"
        ) from None
    return RunAs(entry.pw_uid, entry.pw_gid)
