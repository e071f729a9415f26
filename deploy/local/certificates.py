"""Certificates of the embedded stack: an authority of its own, and one certificate for all its servers."""

from dataclasses import dataclass
from pathlib import Path

from fairlane_server.private_files import write_private

_NAMES = ("localhost", "127.0.0.1")
_UNIT = "servers"


@dataclass(frozen=True, slots=True)
class Certificates:
    """PEM files of a stack.

    Attributes:
        ca_file: certificate of the authority, for clients.
        server_file: key, certificate and chain, readable by its owner only.
    """

    ca_file: Path
    server_file: Path


def prepare_certificates(folder: Path) -> Certificates:
    """The certificates in this folder; new ones if there are none. Nobody keeps the authority's key: to replace the
    certificates, remove the folder."""
    found = Certificates(folder / "ca.pem", folder / "server.pem")
    if not (found.ca_file.exists() and found.server_file.exists()):
        import trustme
        from cryptography.hazmat.primitives.serialization import (
            Encoding,
            NoEncryption,
            PrivateFormat,
            load_pem_private_key,
        )

        folder.mkdir(parents=True, exist_ok=True)
        authority = trustme.CA(organization_name="Fairlane embedded stack")
        # A broker takes a new certificate in the place of one only for the same subject, which is random by default.
        server = authority.issue_cert(*_NAMES, common_name=_NAMES[0], organization_unit_name=_UNIT)
        key = load_pem_private_key(server.private_key_pem.bytes(), password=None)
        # Kafka reads keys in PKCS#8 alone.
        pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
        write_private(found.server_file, pem + "".join(part.bytes().decode() for part in server.cert_chain_pems))
        # Last: with it, both are there.
        write_private(found.ca_file, authority.cert_pem.bytes().decode())
    return found
