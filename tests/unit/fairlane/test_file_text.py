"""Text of a file that is replaced while a process runs."""

from pathlib import Path

import pytest

from fairlane.file_text import FileText, present
from fairlane.settings import Settings


def test_a_text_is_what_its_file_holds_now(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("first\n")
    text = FileText.of(file)
    assert (text, present(text)) == ("first", "first")
    replace(file, "second")
    assert (text, present(text)) == ("first", "second")
    assert present("given") == "given"


def test_a_file_that_is_gone_or_being_written_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("first")
    text = FileText.of(file)
    for content in ("", "two\nlines\n"):
        replace(file, content)
        assert present(text) == "first"
    file.write_bytes(b"\xff")
    assert present(text) == "first"
    file.unlink()
    assert present(text) == "first"
    replace(file, "second")
    assert present(text) == "second"


def test_a_mounted_secret_is_replaced_by_its_link(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"data-{number}").mkdir()
        (tmp_path / f"data-{number}" / "secret").write_text(f"number {number}")
    (tmp_path / "data").symlink_to("data-1")
    text = FileText.of(tmp_path / "data" / "secret")
    (tmp_path / "new").symlink_to("data-2")
    (tmp_path / "new").rename(tmp_path / "data")
    assert present(text) == "number 2"


def test_settings_keep_the_file_of_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "dsn"
    file.write_text("postgresql://a:first@h/fairlane\n")
    monkeypatch.setenv("POSTGRES_DSN_FILE", str(file))
    dsn = Settings().postgres_dsn.get_secret_value()
    replace(file, "postgresql://a:second@h/fairlane\n")
    assert dsn == "postgresql://a:first@h/fairlane"
    assert present(dsn) == "postgresql://a:second@h/fairlane"


def replace(file: Path, content: str) -> None:
    """As whoever writes secrets does: another file in its place."""
    new = file.with_name("new")
    new.write_text(content)
    new.replace(file)
