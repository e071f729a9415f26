"""Certificates of the servers of a stack, of an authority of its own.

python -m deploy.certificates FOLDER SERVER...

writes FOLDER/authority/ca.pem, for clients, and FOLDER/SERVER/server.pem, with key, certificate and chain, for each
server under its host name and those of this machine. Nobody keeps the authority's key: with one file missing, all are
made anew. Each folder may be a volume: whoever has it mounted can read what is in it.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import trustme

THIS_MACHINE = ("localhost", "127.0.0.1")
_UNIT = "servers"
_READABLE = 0o644


def new_authority() -> "trustme.CA":
    import trustme

    return trustme.CA(organization_name="Fairlane stack")


def server_pem(authority: "trustme.CA", names: Sequence[str]) -> str:
    """Key, certificate and chain of a server with these names; the first one is in its subject."""
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
        load_pem_private_key,
    )

    # A broker takes a new certificate in the place of one only for the same subject, which is random by default.
    server = authority.issue_cert(*names, common_name=names[0], organization_unit_name=_UNIT)
    key = load_pem_private_key(server.private_key_pem.bytes(), password=None)
    # Kafka reads keys in PKCS#8 alone.
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
    return pem + "".join(part.bytes().decode() for part in server.cert_chain_pems)


def make(folder: Path, servers: Sequence[str]) -> bool:
    """Make the files, unless all are there. Returns whether it made any."""
    ca_file = folder / "authority" / "ca.pem"
    server_files = {server: folder / server / "server.pem" for server in servers}
    if all(file.exists() for file in (ca_file, *server_files.values())):
        return False
    # Without it, a run that was interrupted is repeated.
    ca_file.unlink(missing_ok=True)
    authority = new_authority()
    for server, file in server_files.items():
        _write(file, server_pem(authority, (server, *THIS_MACHINE)))
    _write(ca_file, authority.cert_pem.bytes().decode())
    return True


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_suffix(".new")
    new.write_text(text, encoding="utf-8")
    # The user of the server's container is another one than that of this process.
    new.chmod(_READABLE)
    new.replace(file)


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the certificates and say so."""
    parser = argparse.ArgumentParser(prog="python -m deploy.certificates", description="Make the certificates.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("servers", metavar="SERVER", nargs="+")
    options = parser.parse_args(arguments)
    made = make(options.folder, options.servers)
    print(f"certificates of {', '.join(options.servers)}: {'made' if made else 'there already'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
