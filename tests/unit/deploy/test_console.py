"""The first screen of a stack: whole addresses, a first request each way, 80 columns."""

from pathlib import Path

import pytest

from deploy.local.__main__ import addresses, demo_model, demo_tenant, first_requests
from deploy.local.layout import DataDir, Endpoints
from fairlane_server.postgres.rights import PostgresRole

ENDPOINTS = Endpoints(
    kafka_bootstrap_servers="127.0.0.1:23645",
    postgres_dsns={PostgresRole.OPERATOR: "postgresql://fairlane_operator:s3cret@127.0.0.1:30012/fairlane"},
    redis_url="redis://127.0.0.1:30013/0",
    gateway_url="http://127.0.0.1:30572",
)
DATA = DataDir(Path(".fairlane"))


def test_every_address_is_whole_and_no_password_is_shown() -> None:
    text = addresses(ENDPOINTS)
    assert "http://127.0.0.1:30572" in text
    assert "postgresql://fairlane_operator:***@127.0.0.1:30012/fairlane" in text
    assert len(text.splitlines()) == 4


def test_it_fits_80_columns() -> None:
    lines = [*addresses(ENDPOINTS).splitlines(), *first_requests(DATA, ENDPOINTS, "fl_0123456789").splitlines()]
    ours = [line for line in lines if "/.venv/bin/python" not in line]
    assert max(map(len, ours)) <= 80, max(ours, key=len)


@pytest.mark.parametrize("new_key", [None, "fl_0123456789abcdef"])
def test_the_key_is_shown_when_it_is_new_and_named_by_its_file_always(new_key: str | None) -> None:
    text = first_requests(DATA, ENDPOINTS, new_key)
    assert (new_key is not None) == ("shown once" in text)
    assert "Bearer $(cat .fairlane/demo-key)" in text


def test_the_example_names_what_is_deployed() -> None:
    assert (demo_tenant(), demo_model()) == ("acme", "smollm2-135m-instruct")
