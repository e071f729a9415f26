"""Addresses of the parts: passed on whole, shown without passwords."""

import stat
from pathlib import Path

import pytest

from deploy.local.layout import Endpoints, mask
from fairlane_server.postgres.rights import PostgresRole

ENDPOINTS = Endpoints(
    kafka_bootstrap_servers="127.0.0.1:9092",
    postgres_dsns={PostgresRole.GATEWAY: "postgresql://fairlane_gateway:s3cret@127.0.0.1:5432/fairlane"},
    postgres_owner_dsn="postgresql://fairlane_owner:0wner@127.0.0.1:5432/fairlane",
    redis_url="redis://:h1dden@127.0.0.1:6379/0",
    redis_cache_url="redis://:h1dden@127.0.0.1:6380/0",
)


@pytest.mark.parametrize(
    ("address", "masked"),
    [
        ("postgresql://u:p@h:1/d", "postgresql://u:***@h:1/d"),
        ("postgresql://u:p@q@h:1/d", "postgresql://u:***@h:1/d"),
        ("redis://:p@h:1/0", "redis://:***@h:1/0"),
        ("rediss://u:p@h", "rediss://u:***@h"),
        ("host=h user=u password=p port=1", "host=h user=u password=*** port=1"),
        ("host=h password='a b' port=1", "host=h password=*** port=1"),
        ("postgresql://u@h/d?password=p", "postgresql://u@h/d?password=***"),
        ("redis://127.0.0.1:6379/0", "redis://127.0.0.1:6379/0"),
        ("127.0.0.1:9092,127.0.0.1:9093", "127.0.0.1:9092,127.0.0.1:9093"),
    ],
)
def test_passwords_are_masked(address: str, masked: str) -> None:
    assert mask(address) == masked


def test_no_way_of_showing_them_shows_a_password() -> None:
    for shown in (repr(ENDPOINTS), str(ENDPOINTS), f"{ENDPOINTS}", str(ENDPOINTS.masked())):
        assert "127.0.0.1:5432" in shown
        for secret in ("s3cret", "0wner", "h1dden"):
            assert secret not in shown


def test_nobody_gets_a_way_into_postgres_but_that_of_its_role() -> None:
    assert ENDPOINTS.service_env == {
        "KAFKA_BOOTSTRAP_SERVERS": "127.0.0.1:9092",
        "REDIS_URL": ENDPOINTS.redis_url,
        "REDIS_CACHE_URL": ENDPOINTS.redis_cache_url,
    }
    gateway_dsn = ENDPOINTS.postgres_dsn(PostgresRole.GATEWAY)
    assert ENDPOINTS.postgres_env(PostgresRole.GATEWAY) == {"POSTGRES_DSN": gateway_dsn}
    assert ENDPOINTS.postgres_env(PostgresRole.RECORDER) == ENDPOINTS.postgres_env(None) == {}
    assert ENDPOINTS.operator_env("") == ENDPOINTS.service_env, "this stack has no operator"
    assert ENDPOINTS.owner_env == {"POSTGRES_OWNER_DSN": ENDPOINTS.postgres_owner_dsn}
    assert Endpoints(kafka_bootstrap_servers="h:1").service_env == {"KAFKA_BOOTSTRAP_SERVERS": "h:1"}
    assert Endpoints(files_url="/files").service_env == {"FILES_URL": "/files"}


def test_they_are_saved_for_their_owner_only(tmp_path: Path) -> None:
    file = tmp_path / "stack.json"
    ENDPOINTS.save(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert Endpoints.load(file) == ENDPOINTS


def test_what_cannot_be_read_is_no_endpoints(tmp_path: Path) -> None:
    assert Endpoints.load(tmp_path / "none") is None
    (tmp_path / "broken").write_text('{"nothing": 1}')
    assert Endpoints.load(tmp_path / "broken") is None
