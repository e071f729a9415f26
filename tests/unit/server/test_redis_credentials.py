"""Files with the URLs of Redis users: made before the users are, and the ACL file of a server is made from them."""

from pathlib import Path
from urllib.parse import urlsplit

import pytest

from fairlane_server.cli import main
from fairlane_server.redis.credentials import acl_file, read_redis_urls, redis_credentials_file
from fairlane_server.redis.rights import DEFAULT_USER_OFF, RIGHTS, RedisServer, hashed, redis_user

STATE, CACHE = "redis://state:6379/0", "rediss://cache:6380/0?ssl_ca_certs=/ca.pem"
GATEWAY = "fairlane_gateway"


def password(folder: Path, user: str, setting: str = "REDIS_URL") -> str:
    found = urlsplit(read_redis_urls(folder, user)[setting]).password
    assert found
    return found


def passwords_of(text: str, user: str) -> list[str]:
    """The hashes in the line of a user."""
    (line,) = [line for line in text.splitlines() if line.startswith(f"user {user} ")]
    return [word for word in line.split() if word.startswith("#")]


def test_every_user_of_a_server_has_a_file_and_a_line_with_its_password(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "credentials"
    text = acl_file(folder, RedisServer.STATE, STATE)
    roles = RIGHTS[RedisServer.STATE]
    assert {file.name for file in folder.iterdir()} == {f"fairlane_{role}.redis.env" for role in roles}
    assert text.splitlines()[0] == DEFAULT_USER_OFF
    assert len(text.splitlines()) == 1 + len(roles)
    for role in roles:
        user = redis_user(role)
        assert passwords_of(text, user) == [hashed(password(folder, user))]
        assert password(folder, user) not in text
    assert len({password(folder, redis_user(role)) for role in roles}) == len(roles)


def test_a_file_has_the_urls_of_both_servers_with_a_password_for_each(tmp_path: Path) -> None:
    for server, address in ((RedisServer.STATE, STATE), (RedisServer.CACHE, CACHE)):
        acl_file(tmp_path, server, address)
    one, other = password(tmp_path, GATEWAY), password(tmp_path, GATEWAY, "REDIS_CACHE_URL")
    assert one != other
    assert redis_credentials_file(tmp_path, GATEWAY).read_text(encoding="utf-8").splitlines() == [
        f"REDIS_CACHE_URL=rediss://{GATEWAY}:{other}@cache:6380/0?ssl_ca_certs=/ca.pem",
        f"REDIS_URL=redis://{GATEWAY}:{one}@state:6379/0",
    ]
    assert read_redis_urls(tmp_path, "fairlane_consumer").keys() == {"REDIS_CACHE_URL"}


def test_passwords_stay_also_when_the_address_changes(tmp_path: Path) -> None:
    text = acl_file(tmp_path, RedisServer.STATE, STATE)
    before = password(tmp_path, GATEWAY)
    assert acl_file(tmp_path, RedisServer.STATE, "redis://elsewhere:1/0") == text
    assert read_redis_urls(tmp_path, GATEWAY) == {"REDIS_URL": f"redis://{GATEWAY}:{before}@elsewhere:1/0"}


def test_a_password_can_be_replaced_while_the_old_one_is_valid(tmp_path: Path) -> None:
    acl_file(tmp_path, RedisServer.STATE, STATE)
    file = redis_credentials_file(tmp_path, GATEWAY)
    old = password(tmp_path, GATEWAY)
    former = file.rename(file.with_name(f"{file.name}.old"))
    both = acl_file(tmp_path, RedisServer.STATE, STATE)
    new = password(tmp_path, GATEWAY)
    assert new != old
    assert passwords_of(both, GATEWAY) == [hashed(new), hashed(old)]
    former.unlink()
    assert passwords_of(acl_file(tmp_path, RedisServer.STATE, STATE), GATEWAY) == [hashed(new)]


def test_files_and_their_new_folder_are_private(tmp_path: Path) -> None:
    folder = tmp_path / "credentials"
    acl_file(folder, RedisServer.CACHE, CACHE)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o600}


def test_a_file_that_others_can_open_is_refused(tmp_path: Path) -> None:
    acl_file(tmp_path, RedisServer.STATE, STATE)
    redis_credentials_file(tmp_path, GATEWAY).chmod(0o640)
    for refused in (
        lambda: read_redis_urls(tmp_path, GATEWAY),
        lambda: acl_file(tmp_path, RedisServer.STATE, STATE),
    ):
        with pytest.raises(ValueError, match=r"fairlane_gateway\.redis\.env: must belong to the user of this process"):
            refused()


@pytest.mark.parametrize(
    "text",
    [
        *("", "nonsense", "REDIS_URL=redis://fairlane_gateway@h:1/0\n", "REDIS_URL=redis://:word@h:1/0\n"),
        "REDIS_URL=redis://fairlane_dispatcher:word@h:1/0\n",
        "REDIS_URL=redis://fairlane_gateway:word@h:1/0\nLD_PRELOAD=x\n",
    ],
)
def test_a_file_that_holds_anything_else_is_refused(tmp_path: Path, text: str) -> None:
    file = redis_credentials_file(tmp_path, GATEWAY)
    file.touch(mode=0o600)
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="holds no password of fairlane_gateway"):
        read_redis_urls(tmp_path, GATEWAY)
    assert file.read_text(encoding="utf-8") == text


@pytest.mark.parametrize(
    "address",
    [
        *("state:6379", "unix:///run/redis.sock", "http://state:6379/0", "redis:///0", "redis://state:6379/1"),
        *("redis://:s3cret@state:6379/0", "redis://someone:s3cret@state:6379/0", "redis://someone@state:6379/0"),
    ],
)
def test_an_address_that_is_none_is_refused_and_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], address: str
) -> None:
    monkeypatch.setenv("REDIS_URL", address)
    with pytest.raises(SystemExit) as ended:
        main(["access", "redis", "state", "--credentials", str(tmp_path / "credentials")])
    assert ended.value.code == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: the address must be redis://HOST:PORT/0")
    assert "s3cret" not in shown.err
    assert not (tmp_path / "credentials").exists()


def test_the_command_prints_the_file_and_no_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REDIS_CACHE_URL", CACHE)
    arguments = ["access", "redis", "cache", "--credentials", str(tmp_path)]
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0
    shown = capsys.readouterr()
    assert shown.out == acl_file(tmp_path, RedisServer.CACHE, CACHE)
    assert shown.err == ""
    assert all(
        password(tmp_path, redis_user(role), "REDIS_CACHE_URL") not in shown.out for role in RIGHTS[RedisServer.CACHE]
    )


def test_the_command_needs_the_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("REDIS_CACHE_URL", raising=False)
    with pytest.raises(SystemExit):
        main(["access", "redis", "cache", "--credentials", str(tmp_path)])
    assert capsys.readouterr().err == "error: REDIS_CACHE_URL: set it to the address of the server\n"
