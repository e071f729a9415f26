"""A storage that speaks S3, in this process."""

import re
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from moto.server import ThreadedMotoServer


@contextmanager
def s3_storage(bucket: str) -> Iterator[str]:
    """Its endpoint; it has this bucket, and what it is to be asked with stands in the environment."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    names = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in names.items():
                patch.setenv(name, value)
            request = urllib.request.Request(f"http://{host}:{port}/{bucket}", method="PUT")
            with urllib.request.urlopen(request, timeout=10):  # noqa: S310 - our own server
                pass
            yield f"http://{host}:{port}"
    finally:
        server.stop()


def keys_in(endpoint: str, bucket: str) -> set[str]:
    """Of everything that is there."""
    with urllib.request.urlopen(f"{endpoint}/{bucket}?list-type=2", timeout=10) as listed:  # noqa: S310 - our own server
        return set(re.findall(r"<Key>([^<]+)</Key>", listed.read().decode()))
