"""Certificates of the embedded stack: an authority of its own, and one certificate for all its servers."""

from dataclasses import dataclass
from pathlib import Path

from deploy.certificates import THIS_MACHINE, new_authority, server_pem
from fairlane_server.private_files import write_private


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
        folder.mkdir(parents=True, exist_ok=True)
        authority = new_authority()
        write_private(found.server_file, server_pem(authority, THIS_MACHINE))
        # Last: with it, both are there.
        write_private(found.ca_file, authority.cert_pem.bytes().decode())
    return found
