"""Which files a file, a folder or a glob means, what they are called, and what is left out."""

import errno
import os
from pathlib import Path

import pytest

from fairlane_server.retrieval import sources
from fairlane_server.retrieval.parsers import DocumentFormat
from fairlane_server.retrieval.sources import SkippedFile, Sources, SourcesError, find_sources

TREE = ("b.md", "a/z.txt", "a/deep/page.HTML", "c.pdf", "photo.jpg", ".git/config.txt", ".hidden.md", "a/.secret.txt")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "docs"
    for name in TREE:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"text of {name}")
    return folder


def names(found: Sources) -> list[str]:
    return [file.source for file in found.files]


def error_of(*given: str | Path) -> str:
    with pytest.raises(SourcesError) as caught:
        find_sources(given)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_folder_is_every_file_of_a_known_format_in_it(root: Path) -> None:
    found = find_sources([root])
    assert names(found) == ["a/deep/page.HTML", "a/z.txt", "b.md", "c.pdf"]
    assert [file.format for file in found.files] == [
        DocumentFormat.HTML,
        DocumentFormat.TEXT,
        DocumentFormat.MARKDOWN,
        DocumentFormat.PDF,
    ]
    assert [file.path for file in found.files] == [root / name for name in names(found)]
    assert found.files[2].size_bytes == len("text of b.md")
    assert found.left_out == (
        SkippedFile(".git", "hidden"),
        SkippedFile(".hidden.md", "hidden"),
        SkippedFile("a/.secret.txt", "hidden"),
        SkippedFile("photo.jpg", "of no known format"),
    )
    assert found.whole


def test_names_do_not_depend_on_how_the_folder_is_given(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root.parent)
    assert names(find_sources(["docs"])) == names(find_sources([f"{root}/"])) == names(find_sources([root]))
    monkeypatch.chdir(root)
    assert names(find_sources(["."])) == names(find_sources([root]))


def test_file_is_called_by_its_name(root: Path) -> None:
    found = find_sources([root / "a" / "z.txt"])
    assert (names(found), found.whole) == (["z.txt"], False)
    assert names(find_sources([root / ".hidden.md"])) == [".hidden.md"], "it was asked for"


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.md", ["b.md"]),
        ("**/*.txt", ["a/z.txt"]),
        ("a/**/*", ["deep/page.HTML", "z.txt"]),
        ("?.[mp]d*", ["b.md", "c.pdf"]),
        (".*.md", [".hidden.md"]),
    ],
)
def test_glob_names_files_from_its_first_wildcard_on(root: Path, pattern: str, expected: list[str]) -> None:
    found = find_sources([f"{root}/{pattern}"])
    assert (names(found), found.whole) == (expected, False)


def test_file_whose_name_looks_like_a_glob_is_itself(root: Path) -> None:
    (root / "notes[1].md").write_text("text")
    assert names(find_sources([root / "notes[1].md"])) == ["notes[1].md"]


def test_links_are_followed_and_circles_end(root: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "linked.md").write_text("text")
    (root / "a" / "up").symlink_to(root)
    (root / "far").symlink_to(elsewhere)
    (root / "far-again").symlink_to(elsewhere)
    (root / "one.md").symlink_to(elsewhere / "linked.md")
    (root / "nowhere.md").symlink_to(elsewhere / "none.md")
    (root / "self.md").symlink_to(root / "self.md")
    found = find_sources([root], follow_links=True)
    assert names(found) == ["a/deep/page.HTML", "a/z.txt", "b.md", "c.pdf", "far/linked.md", "one.md"]
    assert {file.within for file in found.files} == {None}
    reasons = {left.source: left.reason for left in found.left_out}
    assert reasons["a/up"] == reasons["far-again"] == "a folder that was read already"
    assert reasons["nowhere.md"] == reasons["self.md"] == "a link that leads nowhere"
    matched = find_sources([f"{root}/**/*.md"], follow_links=True)
    assert names(matched) == ["b.md", "one.md"], "a glob does not follow links to folders"


def test_links_that_lead_out_of_the_folder_are_left_out(root: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "docs-of-others"
    elsewhere.mkdir()
    (elsewhere / "linked.md").write_text("text")
    (root / "far").symlink_to(elsewhere)
    (root / "one.md").symlink_to(elsewhere / "linked.md")
    (root / "two.md").symlink_to(root / "one.md")
    (root / "again.md").symlink_to("b.md")
    (root / "nowhere.md").symlink_to(elsewhere / "none.md")
    (tmp_path / "way").symlink_to(root)
    outside = "a link that leads out of the folder"
    for given in (root, tmp_path / "way"):
        found = find_sources([given])
        assert names(found) == ["a/deep/page.HTML", "a/z.txt", "again.md", "b.md", "c.pdf"]
        reasons = {left.source: left.reason for left in found.left_out}
        assert [reasons[name] for name in ("far", "one.md", "two.md")] == [outside] * 3
        assert reasons["nowhere.md"] == "a link that leads nowhere"
        assert {file.within for file in found.files} == {root}
    matched = find_sources([f"{root}/*.md", f"{root}/*/*.md", f"{root}/b.*"][:1])
    assert names(matched) == ["again.md", "b.md"]
    assert SkippedFile("one.md", outside) in matched.left_out
    assert error_of(f"{root}/*/linked.md").endswith("left out: 1")
    assert names(find_sources([root / "one.md"])) == ["one.md"], "it was asked for"


@pytest.mark.parametrize("number", [errno.ENAMETOOLONG, errno.EACCES])
def test_file_that_cannot_be_looked_at_is_left_out_and_the_others_are_taken(
    root: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    stat = os.stat

    def refusing(path: object, **options: object) -> object:
        if str(path) == str(root / "b.md"):
            raise OSError(number, os.strerror(number))
        return stat(path, **options)  # type: ignore[arg-type]  # whatever it was called with

    monkeypatch.setattr(os, "stat", refusing)
    for given in (root, f"{root}/**/*"):
        found = find_sources([given])
        assert names(found) == ["a/deep/page.HTML", "a/z.txt", "c.pdf"]
        assert SkippedFile("b.md", os.strerror(number)) in found.left_out


def test_what_is_no_regular_file_is_left_out(root: Path) -> None:
    os.mkfifo(root / "pipe.txt")
    assert SkippedFile("pipe.txt", "no regular file") in find_sources([root]).left_out


def test_name_that_is_not_utf8_is_left_out_and_can_be_printed(root: Path) -> None:
    Path(os.fsdecode(os.fsencode(root) + b"/caf\xe9.md")).write_text("text")
    found = find_sources([root])
    assert SkippedFile("caf?.md", "its name is not UTF-8") in found.left_out
    assert "caf" not in "".join(names(found))


def test_folder_that_cannot_be_read_is_told_apart(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Permissions mean nothing to root, who may run this.
    scandir = os.scandir

    def refusing(path: Path) -> object:
        if path == root / "a":
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    found = find_sources([root])
    assert names(found) == ["b.md", "c.pdf"]
    assert found.unread == (SkippedFile("a", "Permission denied"),)
    assert error_of(root / "a") == f"{root}/a: cannot be read (Permission denied)"
    matched = find_sources([f"{root}/**/*.*"])
    assert names(matched) == ["b.md", "c.pdf"]
    assert matched.unread == (SkippedFile("a", "Permission denied"),)
    assert find_sources([f"{root}/*.md"]).unread == (), "it is not looked into"


def test_nothing_to_ingest_is_an_error(root: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    suffixes = ".txt, .text, .rst, .md, .markdown, .html, .htm, .xhtml, .pdf"
    assert error_of(empty) == f"{empty}: holds no file to ingest ({suffixes})"
    (empty / "photo.jpg").touch()
    assert error_of(empty) == f"{empty}: holds no file to ingest ({suffixes}); left out: 1"
    assert error_of(f"{root}/*.rst") == f"{root}/*.rst: holds no file to ingest ({suffixes})"
    assert error_of(root, f"{root}/*.rst") == f"{root}/*.rst: holds no file to ingest ({suffixes})"
    assert error_of(root / "none.md") == f"{root}/none.md: No such file or directory"
    assert error_of(root / "photo.jpg") == f"{root}/photo.jpg: of no known format ({suffixes})"
    assert error_of(f"{root}/**.md").startswith(f"{root}/**.md: ** stands for folders")
    assert error_of() == "say which files, folders or globs"


def test_two_files_of_one_name_are_an_error_and_one_file_given_twice_is_not(root: Path) -> None:
    (root / "a" / "b.md").write_text("another")
    message = f"{root}/b.md and {root}/a/b.md would both be 'b.md': give the folder that holds both"
    assert error_of(root / "b.md", root / "a" / "b.md") == message
    assert names(find_sources([root / "b.md", root / "b.md", f"{root}/*.md"])) == ["b.md"]


def test_files_have_a_most(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MOST_FILES", 3)
    assert error_of(root) == "more than 3 files: ingest them in parts"
