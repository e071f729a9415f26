"""Postgres of the embedded stack with TLS: nobody comes in without it, and no client takes another server for it."""

import stat
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from deploy.local.certificates import prepare_certificates
from deploy.local.stack import LocalStack
from fairlane.settings import Settings
from fairlane_server.postgres.migrations import upgrade
from fairlane_server.postgres.rights import PostgresRole


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    # A path that must be quoted in a URL.
    folder = tmp_path_factory.mktemp("secured postgres")
    with LocalStack(data_dir=folder, parts=("postgres",), secured=True, environ={}) as running:
        yield running


@pytest.fixture
def dsn(stack: LocalStack) -> str:
    return stack.endpoints.postgres_dsn(PostgresRole.GATEWAY)


def refusal(dsn: str) -> str:
    """Why there is no connection."""
    with pytest.raises(psycopg.OperationalError) as caught, psycopg.connect(dsn, connect_timeout=5):
        pass
    return str(caught.value)


def test_every_role_comes_in_over_tls_and_checks_whom_it_talks_to(stack: LocalStack) -> None:
    endpoints = stack.endpoints
    ca_file = str(stack.data_dir.certificates / "ca.pem")
    for dsn in (endpoints.postgres_owner_dsn, *endpoints.postgres_dsns.values()):
        given = conninfo_to_dict(dsn)
        assert (given["sslmode"], given["sslrootcert"]) == ("verify-full", ca_file)
        with psycopg.connect(dsn, connect_timeout=5) as connection:
            used = "SELECT ssl, version FROM pg_stat_ssl WHERE pid = pg_backend_pid()"
            assert connection.execute(used).fetchone() == (True, "TLSv1.3")


def test_a_connection_without_tls_is_refused_whoever_asks(stack: LocalStack) -> None:
    endpoints = stack.endpoints
    for dsn in (endpoints.postgres_owner_dsn, *endpoints.postgres_dsns.values()):
        said = refusal(make_conninfo(dsn, sslmode="disable", sslrootcert=""))
        assert "no pg_hba.conf entry" in said
        assert "no encryption" in said
    assert not list(stack.data_dir.postgres.glob(".s.PGSQL.*")), "nor over a socket"


def test_a_server_with_a_certificate_of_another_authority_is_refused(dsn: str, tmp_path: Path) -> None:
    other = prepare_certificates(tmp_path)
    assert "certificate verify failed" in refusal(make_conninfo(dsn, sslrootcert=str(other.ca_file)))


def test_a_server_under_another_name_is_refused(dsn: str) -> None:
    elsewhere = make_conninfo(dsn, host="db.example", hostaddr="127.0.0.1")
    assert 'does not match host name "db.example"' in refusal(elsewhere)
    # Its name is all that is wrong with it.
    with psycopg.connect(make_conninfo(elsewhere, sslmode="verify-ca"), connect_timeout=5):
        pass


def test_a_password_is_needed_behind_tls_too(dsn: str) -> None:
    assert "password authentication failed" in refusal(make_conninfo(dsn, password="wrong"))


def test_the_key_is_its_servers_alone_and_no_password_is_in_a_log(stack: LocalStack) -> None:
    folder = stack.data_dir.postgres
    key, data = (folder / "server.key").stat(), (folder / "data").stat()
    assert (stat.S_IMODE(key.st_mode), key.st_uid) == (0o600, data.st_uid)
    assert "PRIVATE KEY" not in (folder / "server.crt").read_text(encoding="utf-8")
    shown = "".join(file.read_text(encoding="utf-8", errors="replace") for file in stack.data_dir.logs.glob("*.log"))
    shown += str(stack.endpoints.masked()) + repr(stack.endpoints)
    for dsn in (stack.endpoints.postgres_owner_dsn, *stack.endpoints.postgres_dsns.values()):
        assert str(conninfo_to_dict(dsn)["password"]) not in shown


def test_tables_are_made_over_tls(stack: LocalStack) -> None:
    done = upgrade(Settings(postgres_owner_dsn=stack.endpoints.postgres_owner_dsn))
    assert done.missing_roles == ()


def test_data_are_opened_with_and_without_tls(tmp_path: Path) -> None:
    for secured in (False, True, False):
        with LocalStack(data_dir=tmp_path, parts=("postgres",), secured=secured, environ={}) as stack:
            dsn = stack.endpoints.postgres_owner_dsn
            with psycopg.connect(dsn, connect_timeout=5, autocommit=True) as connection:
                connection.execute("CREATE TABLE IF NOT EXISTS kept (n int)")
            assert ("sslmode" in conninfo_to_dict(dsn)) is secured
