"""Passwords of Kafka users as files: one for each user, in the notation of environment files, readable by its owner.

``USER.env`` holds the password of a user that was created, ``USER.env.new`` that of one whose creation is not finished.
"""

import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from fairlane_server.private_files import read_private, sync_folder, write_private

PASSWORD = "KAFKA_SASL_PASSWORD"  # noqa: S105 - the name of a setting
_USERNAME = "KAFKA_SASL_USERNAME"
_PASSWORD_BYTES = 32


def credentials_file(folder: Path, user: str) -> Path:
    """Where the credentials of this user are kept."""
    return folder / f"{user}.env"


def has_credentials(folder: Path, user: str) -> bool:
    """Whether this user has a file, also an unfinished one."""
    return credentials_file(folder, user).exists() or _draft(folder, user).exists()


def read_credentials(folder: Path, user: str) -> dict[str, str]:
    """The settings in the newest file of this user. Raises OSError, and ValueError for a file that holds no password of
    it or is not private."""
    draft = _draft(folder, user)
    path = draft if draft.exists() else credentials_file(folder, user)
    found = dict(line.split("=", 1) for line in read_private(path).splitlines() if "=" in line)
    if found.get(_USERNAME) != user or not found.get(PASSWORD):
        raise ValueError(f"{path}: holds no password of {user}")
    return found


def given_passwords(text: str) -> dict[str, str]:
    """Passwords by user, from USER=PASSWORD separated by spaces. Raises ValueError, which quotes no password: an entry
    is incomplete or names the user of another one."""
    given: dict[str, str] = {}
    for number, entry in enumerate(text.split(), 1):
        user, _, password = entry.partition("=")
        if not user or not password:
            raise ValueError(f"entry {number} is not USER=PASSWORD")
        if user in given:
            raise ValueError(f"{user} has two passwords")
        given[user] = password
    return given


def prepare_passwords(
    folder: Path, users: Iterable[str], given: Mapping[str, str] = MappingProxyType({})
) -> dict[str, str]:
    """The passwords of users to be created: the given one, that of a creation which did not finish, or a random one.

    Files come before users, so that no password is lost when the command ends in between. Raises as
    ``read_credentials``.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return {user: _prepare(folder, user, given.get(user)) for user in users}


def keep_passwords(folder: Path, users: Iterable[str]) -> None:
    """These users exist: where a creation has left a file, it replaces the former one. Raises OSError."""
    drafts = [(draft, user) for user in users if (draft := _draft(folder, user)).exists()]
    for draft, user in drafts:
        draft.replace(credentials_file(folder, user))
    if drafts:
        sync_folder(folder)


def remove_credentials(folder: Path, user: str) -> None:
    """Remove the files of this user, if there are any. Raises OSError."""
    for path in (credentials_file(folder, user), _draft(folder, user)):
        path.unlink(missing_ok=True)


def _draft(folder: Path, user: str) -> Path:
    return folder / f"{user}.env.new"


def _prepare(folder: Path, user: str, given: str | None) -> str:
    draft = _draft(folder, user)
    if given is None and draft.exists():
        return read_credentials(folder, user)[PASSWORD]
    password = secrets.token_urlsafe(_PASSWORD_BYTES) if given is None else given
    text = f"KAFKA_SASL_MECHANISM=SCRAM-SHA-512\n{_USERNAME}={user}\n{PASSWORD}={password}\n"
    write_private(draft, text, durable=True)
    return password
