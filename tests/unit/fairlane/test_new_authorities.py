"""A folder of authorities: a certificate of a new one is accepted without a new client."""

import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trustme
from aiokafka.helpers import create_ssl_context
from pydantic import SecretStr

from fairlane.kafka_clients import KafkaAdmin
from fairlane.kafka_config import authorities, connection
from fairlane.settings import KafkaSettings
from fairlane_server.redis.client import redis_client
from tests.kit.waiting import eventually

HOST = "127.0.0.1"
_TIMEOUT_S = 5.0


@dataclass
class TlsServer:
    """Takes one connection after another and counts the clients that sent something."""

    authority: trustme.CA
    listener: socket.socket = field(default_factory=lambda: socket.create_server((HOST, 0)))
    accepted: int = 0
    refused: int = 0

    @property
    def port(self) -> int:
        port: int = self.listener.getsockname()[1]
        return port

    def run(self) -> None:
        with suppress(OSError):  # closed
            while True:
                plain, _ = self.listener.accept()
                with plain:
                    plain.settimeout(_TIMEOUT_S)
                    self._serve(plain)

    def _serve(self, plain: socket.socket) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.authority.issue_cert(HOST).configure_cert(context)
        try:
            with context.wrap_socket(plain, server_side=True) as secured:
                self.accepted += 1 if secured.recv(1) else 0
        except OSError:
            self.refused += 1


@pytest.fixture
def server() -> Iterator[TlsServer]:
    found = TlsServer(trustme.CA())
    thread = threading.Thread(target=found.run, daemon=True)
    thread.start()
    yield found
    found.listener.shutdown(socket.SHUT_RDWR)
    found.listener.close()
    thread.join(2 * _TIMEOUT_S)


def trust(folder: Path, name: str, authority: trustme.CA) -> None:
    folder.mkdir(exist_ok=True)
    authority.cert_pem.write_to_path(str(folder / f"{name}.pem"))
    openssl = shutil.which("openssl")
    assert openssl is not None
    subprocess.run((openssl, "rehash", str(folder)), check=True, timeout=30)


def settings_of(server: TlsServer, ca: Path) -> KafkaSettings:
    return KafkaSettings(
        kafka_bootstrap_servers=f"{HOST}:{server.port}", kafka_security_protocol="SSL", kafka_ssl_ca_file=ca
    )


def test_a_client_of_librdkafka_trusts_an_authority_that_is_added_to_its_folder(
    server: TlsServer, tmp_path: Path
) -> None:
    folder = tmp_path / "authorities"
    trust(folder, "old", trustme.CA())
    admin = KafkaAdmin(connection(settings_of(server, folder)) | {"log_level": 0})

    def polled(count: int) -> int:
        admin.poll(0.05)
        return count

    eventually(lambda: polled(server.refused) > 1, what="refused certificates")
    assert server.accepted == 0
    trust(folder, "new", server.authority)
    eventually(lambda: polled(server.accepted) > 0, what="an accepted certificate")


def dispatchers_context(server: TlsServer, folder: Path) -> ssl.SSLContext:
    context: ssl.SSLContext = create_ssl_context(**authorities(settings_of(server, folder)))
    return context


def redis_context(server: TlsServer, folder: Path) -> ssl.SSLContext:
    client = redis_client(SecretStr(f"rediss://{HOST}:{server.port}/0?ssl_ca_path={folder}"), _TIMEOUT_S)
    assert client is not None
    context: ssl.SSLContext = client.connection_pool.connection_kwargs["tls"]
    return context


@pytest.mark.parametrize("context_of", [dispatchers_context, redis_context])
def test_the_dispatchers_reader_and_clients_of_redis_do_as_well(
    server: TlsServer, tmp_path: Path, context_of: Callable[[TlsServer, Path], ssl.SSLContext]
) -> None:
    folder = tmp_path / "authorities"
    trust(folder, "old", trustme.CA())
    context = context_of(server, folder)

    def connect() -> None:
        with (
            socket.create_connection((HOST, server.port), timeout=_TIMEOUT_S) as plain,
            context.wrap_socket(plain, server_hostname=HOST) as secured,
        ):
            secured.sendall(b"x")

    with pytest.raises(ssl.SSLCertVerificationError):
        connect()
    trust(folder, "new", server.authority)
    connect()
    eventually(lambda: server.accepted == 1, what="the accepted certificate")


def test_a_file_is_a_file(tmp_path: Path) -> None:
    file = tmp_path / "ca.pem"
    assert authorities(KafkaSettings()) == {}
    assert authorities(KafkaSettings(kafka_ssl_ca_file=file)) == {"cafile": str(file)}
    assert authorities(KafkaSettings(kafka_ssl_ca_file=tmp_path)) == {"capath": str(tmp_path)}
