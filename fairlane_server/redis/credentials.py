"""Passwords of Redis users as files: one for each user, in the notation of environment files, readable by its owner.

``USER.redis.env`` holds the user's URLs, with a password of its own for each server. The ACL file of a server is made
from these files: they are there before the users are.
"""

import secrets
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from fairlane_server.private_files import read_private, write_private
from fairlane_server.redis.rights import DEFAULT_USER_OFF, RIGHTS, RedisServer, acl_line, hashed, redis_user

_PASSWORD_BYTES = 32
_SCHEMES = ("redis", "rediss")


def redis_credentials_file(folder: Path, user: str) -> Path:
    """Where the URLs of this user are kept."""
    return folder / f"{user}.redis.env"


def read_redis_urls(folder: Path, user: str) -> dict[str, str]:
    """The settings in the file of this user: REDIS_URL, REDIS_CACHE_URL, or both. Raises OSError, and ValueError for a
    file that holds no password of it or is not private."""
    return _read(redis_credentials_file(folder, user), user)


def acl_file(folder: Path, server: RedisServer, address: str, *, reads_apart: bool = True) -> str:
    """The text of the server's ACL file: its users with the passwords in this folder, and nobody else.

    A user without a password gets a new one. What ``USER.redis.env.old`` holds is valid as well, so that a password can
    be replaced while its user's processes run.

    Args:
        folder: of the users' files; made if it is not there.
        server: the server whose users these are.
        address: URL of the server, without user and password; the users' files get it with theirs.
        reads_apart: as for ``acl_line``.

    Raises:
        OSError: a file cannot be read or written.
        ValueError: of the address, or a file is not private or holds no password of its user.
    """
    parts = _checked(address)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    lines = [DEFAULT_USER_OFF]
    for role in RIGHTS[server]:
        passwords = [hashed(password) for password in _prepare(folder, redis_user(role), server, parts)]
        lines.append(acl_line(server, role, passwords, reads_apart=reads_apart))
    return "".join(f"{line}\n" for line in lines)


def _prepare(folder: Path, user: str, server: RedisServer, address: SplitResult) -> list[str]:
    """The passwords of this user, the one in its file first."""
    path = redis_credentials_file(folder, user)
    found = _read(path, user) if path.exists() else {}
    password = _password(found.get(server.setting)) or secrets.token_urlsafe(_PASSWORD_BYTES)
    wanted = found | {server.setting: _with_user(address, user, password)}
    if wanted != found:
        write_private(path, "".join(f"{name}={url}\n" for name, url in sorted(wanted.items())), durable=True)
    former = path.with_name(f"{path.name}.old")
    old = _password(_read(former, user).get(server.setting)) if former.exists() else None
    return [password] if old is None else [password, old]


def _read(path: Path, user: str) -> dict[str, str]:
    found = dict(line.split("=", 1) for line in read_private(path).splitlines() if "=" in line)
    settings = {server.setting for server in RedisServer}
    if not found or not found.keys() <= settings or not all(_is_of(url, user) for url in found.values()):
        raise ValueError(f"{path}: holds no password of {user}")
    return found


def _is_of(url: str, user: str) -> bool:
    return unquote(urlsplit(url).username or "") == user and bool(_password(url))


def _password(url: str | None) -> str | None:
    return None if url is None else unquote(urlsplit(url).password or "") or None


def _checked(address: str) -> SplitResult:
    parts = urlsplit(address)
    # Users may not choose another database: rights do not tell databases apart.
    if parts.scheme not in _SCHEMES or not parts.hostname or "@" in parts.netloc or parts.path not in {"", "/", "/0"}:
        raise ValueError("the address must be redis://HOST:PORT/0 or rediss://HOST:PORT/0, without user and password")
    return parts


def _with_user(address: SplitResult, user: str, password: str) -> str:
    return address._replace(netloc=f"{user}:{password}@{address.netloc}").geturl()
