"""Clients of Redis: short timeouts, no command of their own choice, and one TLS context for all connections."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from deploy.local.certificates import prepare_certificates
from fairlane.file_text import FileText
from fairlane_server.redis.client import blocking_redis_client, redis_client

PLAIN = SecretStr("redis://user:word@127.0.0.1:1/0")


def pool_of(url: SecretStr) -> Any:
    client = redis_client(url, 0.25)
    assert client is not None
    return client.connection_pool


@pytest.mark.parametrize("pool", [pool_of(PLAIN), blocking_redis_client(PLAIN, 0.25).connection_pool])
def test_a_client_gives_up_soon_and_sends_nothing_of_its_own(pool: Any) -> None:
    connection = pool.make_connection()
    assert (connection.username, connection.password, connection.db) == ("user", "word", 0)
    assert connection.socket_timeout == connection.socket_connect_timeout == 0.25
    assert connection.retry.get_retries() == 0
    # What it would send with each connection.
    assert connection.driver_info is None
    assert connection.client_name is None
    assert not (connection.maint_notifications_config and connection.maint_notifications_config.enabled)


def test_there_is_no_client_without_a_url() -> None:
    assert redis_client(None, 0.25) is None


def test_all_connections_share_one_tls_context_that_verifies(tmp_path: Path) -> None:
    ca_file = prepare_certificates(tmp_path).ca_file
    pool = pool_of(SecretStr(f"rediss://user:word@127.0.0.1:1/0?ssl_ca_certs={ca_file}"))
    one, other = (pool.make_connection().ssl_context.get() for _ in range(2))
    assert one is other
    assert (one.check_hostname, one.verify_mode.name) == (True, "CERT_REQUIRED")
    subjects = [str(found["subject"]) for found in one.get_ca_certs()]
    assert [subject for subject in subjects if "Fairlane stack" in subject]


def test_certificates_that_cannot_be_read_are_an_invalid_setting(tmp_path: Path) -> None:
    url = SecretStr(f"rediss://user:w0rd@127.0.0.1:1/0?ssl_ca_certs={tmp_path / 'none.pem'}")
    with pytest.raises(ValueError, match="the certificates for Redis cannot be read") as raised:
        redis_client(url, 0.25)
    assert "w0rd" not in str(raised.value)


def test_a_password_in_a_file_is_that_of_the_moment(tmp_path: Path) -> None:
    file = tmp_path / "url"
    file.write_text("redis://user:first%21@127.0.0.1:1/0")
    url = SecretStr(FileText.of(file))
    pools: list[Any] = [pool_of(url), blocking_redis_client(url, 0.25).connection_pool]
    for pool in pools:
        connection = pool.make_connection()
        assert (connection.host, connection.port, connection.db) == ("127.0.0.1", 1, 0)
        assert connection.credential_provider.get_credentials() == ("user", "first!")
    file.write_text("redis://user:another@127.0.0.1:1/0")
    for pool in pools:
        assert pool.make_connection().credential_provider.get_credentials() == ("user", "another")
