"""Passwords in files are replaced while a process runs: its next connections have the new one."""

import asyncio
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from pydantic import SecretStr
from redis import Redis
from redis.exceptions import RedisError

from deploy.local.redis import NAME
from deploy.local.stack import LocalStack
from fairlane.settings import Settings
from fairlane_server.postgres.connection import ReconnectingConnection
from fairlane_server.postgres.pool import DeadlinePool, rows_for
from fairlane_server.postgres.rights import PostgresRole
from fairlane_server.redis.client import redis_client
from fairlane_server.redis.credentials import acl_file, read_redis_urls, redis_credentials_file
from fairlane_server.redis.rights import RedisRole, RedisServer, redis_user
from fairlane_server.store_error import StoreError
from tests.kit.own_redis import own_redis_server
from tests.kit.waiting import eventually, eventually_awaited

TIMEOUT_S = 10.0
_END_OTHERS = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = current_user AND pid <> pg_backend_pid()
"""


def replace(file: Path, content: str) -> None:
    new = file.with_name(f"{file.name}.new")
    new.write_text(f"{content}\n")
    new.replace(file)


def test_postgres_takes_the_password_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "dsn"
    with LocalStack(data_dir=tmp_path / "stack", parts=("postgres",), secured=True, environ={}) as stack:
        first = stack.endpoints.postgres_dsn(PostgresRole.GATEWAY)
        replace(file, first)
        monkeypatch.setenv("POSTGRES_DSN_FILE", str(file))
        dsn = Settings().postgres_dsn.get_secret_value()
        kept = ReconnectingConnection(dsn, "kept", TIMEOUT_S)

        async def run() -> None:
            pool = DeadlinePool(dsn, "pool", 2)
            await pool.open()
            try:
                assert await answers(pool)
                with kept.transaction() as connection:
                    connection.execute("SELECT 1")
                with psycopg.connect(first, autocommit=True) as admin:
                    admin.execute("ALTER ROLE CURRENT_USER PASSWORD 'the new one'")
                    admin.execute(_END_OTHERS)
                assert not await answers(pool)
                replace(file, make_conninfo("", **{**conninfo_to_dict(first), "password": "the new one"}))
                await eventually_awaited(lambda: answers(pool), what="a connection with the new password")
            finally:
                await pool.close()

        asyncio.run(run())

        def is_connected() -> bool:
            try:
                with kept.transaction() as connection:
                    connection.execute("SELECT 1")
            except psycopg.Error:
                return False
            return True

        eventually(is_connected, what="the blocking connection")
        kept.close()


async def answers(pool: DeadlinePool) -> bool:
    try:
        await rows_for(pool, "", [(b"SELECT 1", ())], TIMEOUT_S)
    except (StoreError, TimeoutError):
        return False
    return True


def test_redis_takes_the_password_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    credentials, file = tmp_path / "credentials", tmp_path / "url"
    user = redis_user(RedisRole.GATEWAY)
    with own_redis_server(tmp_path / "redis", NAME, credentials) as server:

        def load() -> str:
            """Make the server's users from the files. The URL of the gateway's."""
            address = f"redis://127.0.0.1:{server.port}/0"
            server.acl_file.write_text(acl_file(credentials, RedisServer.STATE, address, reads_apart=False))
            operator = read_redis_urls(credentials, redis_user(RedisRole.OPERATOR))["REDIS_URL"]
            with Redis.from_url(operator) as redis:
                assert redis.acl_load()
            return read_redis_urls(credentials, user)["REDIS_URL"]

        replace(file, load())
        monkeypatch.setenv("REDIS_URL_FILE", str(file))
        url = Settings().redis_url
        assert isinstance(url, SecretStr)

        async def run() -> None:
            client = redis_client(url, TIMEOUT_S)
            assert client is not None
            async with client:
                assert await client.ping()
                redis_credentials_file(credentials, user).unlink()
                new = load()
                await client.connection_pool.disconnect()
                with pytest.raises(RedisError):
                    await client.ping()
                replace(file, new)
                assert await client.ping()

        asyncio.run(run())
