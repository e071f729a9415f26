"""Files with the passwords of Kafka users: written before a user is created, kept once it was."""

import os
from pathlib import Path

import pytest

from fairlane_server.access.credentials import (
    PASSWORD,
    credentials_file,
    given_passwords,
    has_credentials,
    keep_passwords,
    prepare_passwords,
    read_credentials,
    remove_credentials,
)

USER = "fairlane_gateway"


def read_password(folder: Path) -> str:
    return read_credentials(folder, USER)[PASSWORD]


def test_a_password_is_kept_until_its_user_was_created_and_never_used_for_another_creation(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "credentials"
    first = prepare_passwords(folder, [USER])
    assert prepare_passwords(folder, [USER]) == first, "of a creation that did not finish"
    assert not credentials_file(folder, USER).exists()
    assert read_password(folder) == first[USER]
    keep_passwords(folder, [USER, "fairlane_recorder"])
    assert [file.name for file in folder.iterdir()] == [f"{USER}.env"]
    assert read_password(folder) == first[USER]

    # The user was deleted by others: an old password does not come back.
    second = prepare_passwords(folder, [USER])
    assert second != first
    assert read_password(folder) == second[USER]
    keep_passwords(folder, [USER])
    assert [file.name for file in folder.iterdir()] == [f"{USER}.env"]
    assert read_password(folder) == second[USER]

    prepare_passwords(folder, [USER])
    assert has_credentials(folder, USER)
    remove_credentials(folder, USER)
    assert not has_credentials(folder, USER)
    assert [*folder.iterdir()] == []


def test_a_given_password_is_used_also_in_place_of_one_whose_creation_did_not_finish(tmp_path: Path) -> None:
    other = "fairlane_recorder"
    random = prepare_passwords(tmp_path, [USER])[USER]
    made = prepare_passwords(tmp_path, [USER, other], given_passwords(f"{USER}=sesame=1"))
    assert made[USER] == "sesame=1" == read_password(tmp_path)
    assert made[other] not in {random, "sesame=1"}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f"{USER}=secret other", "entry 2 is not USER=PASSWORD"),
        ("=secret", "entry 1 is not USER=PASSWORD"),
        (f"{USER}=", "entry 1 is not USER=PASSWORD"),
        (f"{USER}=secret\n{USER}=secret", f"{USER} has two passwords"),
    ],
)
def test_given_passwords_that_cannot_be_used_are_refused_without_quoting_one(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"^{reason}$"):
        given_passwords(text)


def test_files_and_their_new_folder_are_private(tmp_path: Path) -> None:
    folder = tmp_path / "credentials"
    prepare_passwords(folder, [USER])
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [file.stat().st_mode & 0o777 for file in folder.iterdir()] == [0o600]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_file_that_others_can_open_is_refused(tmp_path: Path, mode: int) -> None:
    prepare_passwords(tmp_path, [USER])
    (file,) = tmp_path.iterdir()
    file.chmod(mode)
    with pytest.raises(ValueError, match=r"fairlane_gateway\.env\.new: must belong to the user of this process"):
        read_credentials(tmp_path, USER)
    with pytest.raises(ValueError, match="must belong"):
        prepare_passwords(tmp_path, [USER])


def test_a_file_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare_passwords(tmp_path, [USER])
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    with pytest.raises(ValueError, match="must belong to the user of this process"):
        read_credentials(tmp_path, USER)


@pytest.mark.parametrize("text", ["", "KAFKA_SASL_USERNAME=fairlane_gateway\n", "nonsense"])
def test_a_file_without_a_password_of_this_user_is_refused(tmp_path: Path, text: str) -> None:
    file = credentials_file(tmp_path, USER)
    file.touch(mode=0o600)
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="holds no password of fairlane_gateway"):
        read_credentials(tmp_path, USER)
