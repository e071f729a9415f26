"""``fairlane collections`` over a store in memory: what it says, and with which status it ends."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from fairlane_server.cli import main
from fairlane_server.retrieval import embedders, pgvector_store
from fairlane_server.retrieval.embedder import EmbedderError, FloatArray
from tests.kit.memory_collections import LetterEmbedder, MemoryCollections

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def embedder() -> LetterEmbedder:
    return LetterEmbedder()


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, embedder: LetterEmbedder) -> MemoryCollections:
    made = MemoryCollections()
    monkeypatch.setattr(pgvector_store, "PgVectorCollections", lambda _dsn: made)
    monkeypatch.setattr(embedders, "embedder_for", lambda _settings: embedder)
    return made


@pytest.fixture
def run(store: MemoryCollections, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `fairlane collections`: exit status, what it printed, what it complained about."""

    def run_command(*arguments: str | Path, tenant: str = "acme") -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main(["collections", *map(str, arguments), "--tenant", tenant])
        captured = capsys.readouterr()
        assert isinstance(caught.value.code, int)
        return caught.value.code, captured.out, captured.err

    return run_command


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "docs"
    folder.mkdir()
    for name in ("a.md", "b.md", "c.txt"):
        (folder / name).write_text(f"The text of {name}.")
    return folder


def counts(out: str) -> str:
    """The first line, without the time that the second one tells."""
    return out.splitlines()[0]


def test_collection_from_its_creation_to_its_end(run: Run, root: Path) -> None:
    assert run("list") == (0, "tenant acme has no collections\n", "")
    assert run("create", "handbook") == (0, "created handbook of tenant acme: letters, 26 dimensions\n", "")

    code, out, err = run("ingest", "handbook", root)
    assert (code, counts(out), err) == (0, "3 new, 0 changed, 0 unchanged, 0 removed", "")
    assert out.splitlines()[1].startswith("3 passages in ")
    (root / "a.md").write_text("Changed.")
    (root / "b.md").unlink()
    (root / "photo.jpg").touch()
    code, out, err = run("ingest", "handbook", root, "--prune")
    left_out = "; 1 left out (hidden, unknown formats, links; --json names them)"
    assert (code, counts(out), err) == (0, f"0 new, 1 changed, 1 unchanged, 1 removed{left_out}", "")

    code, out, _ = run("list")
    assert code == 0
    assert out.splitlines()[1].split()[:4] == ["handbook", "2", "2", "4"]
    code, out, _ = run("show", "handbook", "--documents")
    assert out.splitlines()[:2] == ["handbook of tenant acme, version 4", "2 documents, 2 passages"]
    assert out.splitlines()[-2:] == ["  a.md", "  c.txt"]

    what = "handbook of tenant acme with 2 documents and 2 passages"
    assert run("delete", "handbook", "--yes") == (0, f"deleted {what}\n", "")
    assert run("list") == (0, "tenant acme has no collections\n", "")


def test_links_that_lead_out_of_the_folder_are_taken_only_when_asked_for(run: Run, root: Path) -> None:
    run("create", "handbook")
    (root.parent / "far.md").write_text("Far away.")
    (root / "far.md").symlink_to(root.parent / "far.md")
    assert counts(run("ingest", "handbook", root)[1]).startswith("3 new, 0 changed, 0 unchanged, 0 removed; 1 left out")
    assert counts(run("ingest", "handbook", root, "--follow-links")[1]) == "1 new, 0 changed, 3 unchanged, 0 removed"


def test_json_is_one_object(run: Run, root: Path) -> None:
    def answer(*arguments: str | Path, code: int = 0) -> dict[str, object]:
        found, out, err = run(*arguments, "--json")
        assert (found, err) == (code, "")
        value = json.loads(out)
        assert isinstance(value, dict)
        return value

    assert answer("create", "handbook") == {
        "tenant": "acme",
        "name": "handbook",
        "embedder": "letters",
        "dimensions": 26,
        "version": 1,
        "documents": 0,
        "passages": 0,
        "created_at_ms": 0,
        "updated_at_ms": 0,
    }
    (root / "empty.md").touch()
    (root / ".hidden.md").touch()
    failures, left_out = (
        [{"source": "empty.md", "reason": "holds no text"}],
        [{"source": ".hidden.md", "reason": "hidden"}],
    )
    assert answer("ingest", "handbook", root, "--dry-run") == {
        "dry_run": True,
        "new": ["a.md", "b.md", "c.txt", "empty.md"],
        "changed": [],
        "unchanged": 0,
        "gone": [],
        "failures": [],
        "left_out": left_out,
    }
    report = answer("ingest", "handbook", root, code=1)
    assert isinstance(report.pop("seconds"), float)
    assert isinstance(report.pop("passages_per_s"), float)
    assert report == {
        "dry_run": False,
        "new": 3,
        "changed": 0,
        "unchanged": 0,
        "removed": 0,
        "passages": 3,
        "failures": failures,
        "left_out": left_out,
        "left": 0,
        "stopped": False,
        "indexed": False,
    }
    (listed,) = (answer("list")["collections"],)
    assert [entry["name"] for entry in listed] == ["handbook"]  # type: ignore[attr-defined] # of JSON
    assert answer("show", "handbook", "--documents")["sources"] == ["a.md", "b.md", "c.txt"]
    assert answer("delete", "handbook", "--yes")["deleted"] == {**answer_of(3, 2), "name": "handbook"}


def answer_of(documents: int, version: int) -> dict[str, object]:
    return {
        "tenant": "acme",
        "embedder": "letters",
        "dimensions": 26,
        "version": version,
        "documents": documents,
        "passages": documents,
        "created_at_ms": 0,
        "updated_at_ms": 0,
    }


def test_dry_run_says_what_would_be_done_and_does_nothing(run: Run, root: Path, store: MemoryCollections) -> None:
    run("create", "handbook")
    run("ingest", "handbook", root / "a.md", root / "b.md")
    (root / "a.md").write_text("Changed.")
    (root / "b.md").unlink()
    (root / "large.txt").touch()
    os.truncate(root / "large.txt", 200_000_000)
    store.puts.clear()
    code, out, err = run("ingest", "handbook", root, "--prune", "--dry-run")
    assert code == 1
    assert out.splitlines() == [
        "new: c.txt",
        "changed: a.md",
        "gone: b.md",
        "would store 1 new and 1 changed documents, remove 1, leave 0 as they are, 1 failed",
    ]
    assert err == "warning: large.txt: has 200,000,000 bytes, more than a document may have (50,000,000)\n"
    assert not store.puts


def test_bad_files_are_named_and_the_others_are_taken(run: Run, root: Path) -> None:
    (root / "d\x1b[31m.md").write_bytes(b"\xff")
    for number in range(25):
        (root / f"empty-{number:02}.md").touch()
    run("create", "handbook")
    code, out, err = run("ingest", "handbook", root)
    assert (code, counts(out)) == (1, "3 new, 0 changed, 0 unchanged, 0 removed, 26 failed")
    lines = err.splitlines()
    assert lines[0] == "warning: d\N{REPLACEMENT CHARACTER}[31m.md: is not valid UTF-8 (byte 0)"
    assert lines[1] == "warning: empty-00.md: holds no text"
    assert lines[20:] == ["warning: and 6 more files (--json names them)"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("create Handbook", "no collection can have the name 'Handbook'"),
        ("create handbook", "there is a collection 'handbook' already"),
        ("show none", "there is no collection 'none'"),
        ("ingest none .", "there is no collection 'none'"),
        ("delete none --yes", "there is no collection 'none'"),
        ("show handbook --tenant globex", "there is no collection 'handbook'"),
        ("delete handbook --yes --tenant globex", "there is no collection 'handbook'"),
        ("ingest handbook . --tenant globex", "there is no collection 'handbook'"),
        ("list --tenant A*", "--tenant A*: no tenant can have this name"),
        ("list --tenant *", "--tenant *: no tenant can have this name"),
        ("ingest handbook", "Missing argument 'PATH...'"),
        ("ingest handbook nowhere", "nowhere: No such file or directory"),
        ("ingest handbook empty", "empty: holds no file to ingest (.txt, "),
        ("ingest handbook *.jpg", "*.jpg: holds no file to ingest (.txt, "),
        ("ingest handbook a.md --prune", "what is gone can be told of one folder alone"),
        ("ingest handbook . --max-tokens 15", "Invalid value for '--max-tokens'"),
        (
            "ingest handbook . --overlap-tokens 101",
            "--overlap-tokens: must be from 0 to half of max_tokens",
        ),
        ("ingest handbook . --max-file-mb 0", "Invalid value for '--max-file-mb'"),
    ],
)
def test_mistake_is_one_line(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.md").write_text("text")
    run("create", "handbook")
    words = arguments.split()
    # The last one counts.
    tenant = words[words.index("--tenant") + 1] if "--tenant" in words else "acme"
    code, out, err = run(*words, tenant=tenant)
    assert (code, out) == (1, "")
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1


def test_tenant_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["collections", "list"])
    assert caught.value.code == 1
    assert capsys.readouterr().err == "error: Missing option '--tenant'. (see --help)\n"


def test_deletion_asks(run: Run, store: MemoryCollections, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run("create", "handbook")
    for answer, code in (("n\n", 1), ("", 1), ("y\n", 0)):
        (tmp_path / "answer").write_text(answer)
        with (tmp_path / "answer").open() as stdin:
            monkeypatch.setattr(sys, "stdin", stdin)
            found, _, err = run("delete", "handbook")
        assert found == code
        assert "Delete handbook of tenant acme with 0 documents and 0 passages? [y/N]" in err
        assert len(store.list("acme")) == code


def test_first_interrupt_stores_what_was_read_and_the_same_command_goes_on(
    run: Run, root: Path, embedder: LetterEmbedder, store: MemoryCollections, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fairlane_server.retrieval.documents import DocumentReader

    run("create", "handbook")
    parse = DocumentReader.parse
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    for number in (signal.SIGINT, signal.SIGTERM):
        # As the first of them is read.
        def interrupted(*arguments: object, number: int = number) -> object:
            signal.raise_signal(number)
            return parse(*arguments)  # type: ignore[arg-type] # handed on as they came

        monkeypatch.setattr(DocumentReader, "parse", interrupted)
        code, out, _ = run("ingest", "handbook", root)
        assert code == 1
        assert counts(out).startswith("stopped: 1 new, 0 changed, ")
        assert counts(out).endswith(" left: the same command goes on")
    monkeypatch.setattr(DocumentReader, "parse", parse)
    assert counts(run("ingest", "handbook", root)[1]) == "1 new, 0 changed, 2 unchanged, 0 removed"
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_second_interrupt_ends_at_once(
    run: Run, root: Path, embedder: LetterEmbedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_texts: Sequence[str]) -> FloatArray:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("it went on")

    run("create", "handbook")
    monkeypatch.setattr(embedder, "embed", interrupted)
    assert run("ingest", "handbook", root) == (130, "", "")


def test_embedder_that_fails_is_one_line(
    run: Run, root: Path, embedder: LetterEmbedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(_texts: Sequence[str]) -> FloatArray:
        raise EmbedderError("http://127.0.0.1:1: nobody answers")

    run("create", "handbook")
    monkeypatch.setattr(embedder, "embed", failing)
    assert run("ingest", "handbook", root) == (1, "", "error: http://127.0.0.1:1: nobody answers\n")


@pytest.mark.parametrize("command", ["create", "ingest", "list", "show", "delete"])
def test_help_names_the_options(capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["collections", command, "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert f"Usage: fairlane collections {command} [OPTIONS]" in " ".join(text.split())
    assert "--tenant TENANT" in text
    assert "--json" in text


@pytest.mark.parametrize("missing", ["numpy", "semantic_text_splitter", "pypdf", "psycopg"])
def test_without_the_extra_it_says_how_to_get_it(missing: str) -> None:
    program = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        "from fairlane_server.cli import main\n"
        "main(['collections', 'ingest', 'handbook', '.', '--tenant', 'acme'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    told = f"error: this needs the extra `retrieval`: pip install 'fairlane[retrieval]' ({missing} is missing)\n"
    assert done.stderr == told


def test_commands_load_nothing_heavy_before_they_run() -> None:
    program = "import sys, fairlane_server.cli; print(sorted({'numpy', 'bs4', 'pypdf', 'psycopg'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
