"""Files that only their owner may read: complete under their names, or not there."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from fairlane_server.private_files import new_files


def test_files_appear_together_when_all_is_written(tmp_path: Path) -> None:
    first, second = tmp_path / "set.jsonl", tmp_path / "set.jsonl.provenance"
    with new_files(first, second) as files:
        for number, file in enumerate(files):
            file.write(b"line %d\n" % number)
        assert not first.exists()
        assert not second.exists()
    assert (first.read_bytes(), second.read_bytes()) == (b"line 0\n", b"line 1\n")
    assert {stat.S_IMODE(one.stat().st_mode) for one in tmp_path.iterdir()} == {0o600}
    assert set(tmp_path.iterdir()) == {first, second}


def test_an_error_of_the_writer_leaves_none(tmp_path: Path) -> None:
    def lines() -> Iterator[bytes]:
        yield b"a line\n"
        raise RuntimeError("the source ended")

    with pytest.raises(RuntimeError, match="the source"), new_files(tmp_path / "set") as (file,):
        file.writelines(lines())
    assert [*tmp_path.iterdir()] == []


def test_a_disk_that_is_full_at_the_end_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"), new_files(tmp_path / "a", tmp_path / "b") as (file, _):
        file.write(b"a line\n")
    assert [*tmp_path.iterdir()] == []


def test_a_name_that_there_is_is_not_replaced(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    second.write_text("mine")
    with pytest.raises(FileExistsError, match="b"), new_files(first, second):
        pytest.fail("nothing may be written")
    second.unlink()
    with pytest.raises(FileExistsError), new_files(first, second):
        first.write_text("somebody else's, meanwhile")
    assert {one.name: one.read_text() for one in tmp_path.iterdir()} == {"a": "somebody else's, meanwhile"}
