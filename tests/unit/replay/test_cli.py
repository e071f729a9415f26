"""What the command says when it is told something wrong: one line, without a key in it."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from producers.replay.__main__ import KEY_VARIABLE, cli
from producers.replay.profiles import PROFILES

_KEY = "fl_0123_secret="


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("play", "{file}", "--via", "gateway", "--url", "nowhere"), "url: not http"),
        (
            ("play", "{file}", "--via", "gateway", "--url", "http://127.0.0.1:1"),
            "trace.csv: line 2, column arrived_at_s",
        ),
        (("play", "{file}", "--tenant", "No Name"), "tenant: 'No Name'"),
        (("play", "{file}", "--factor", "0"), "factor: 0 is not above 0"),
        (("play", "{file}", "--max-tokens", "1"), "max_tokens: 1 is below 2"),
        (("profile", "rush"), "no profile is called 'rush'"),
        (("profile", "burst", "--key", f"acme={_KEY}", "--key", f"acme={_KEY}"), "key: two without a name"),
        (("profile", "burst", "--key", f"acme={_KEY}\x07"), "key of acme: holds a character"),
    ],
    ids=str,
)
def test_what_cannot_be_run_is_said_in_a_line(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("arrived_at_s,prompt_tokens,output_tokens\nnoon,1,1\n")
    done = CliRunner().invoke(cli, [one.format(file=file) for one in arguments], env={KEY_VARIABLE: _KEY})

    assert done.exit_code == 1
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "secret" not in done.output


def test_the_gateway_wants_a_key() -> None:
    done = CliRunner().invoke(cli, ["profile", "baseline"], env={KEY_VARIABLE: None})

    assert done.exit_code == 1
    assert KEY_VARIABLE in done.stderr


def test_help_names_the_profiles() -> None:
    done = CliRunner().invoke(cli, ["profile", "--help"], env={"COLUMNS": "200"})

    assert done.exit_code == 0
    assert all(name in done.stdout for name in PROFILES)


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_bytes(b"arrived_at_s,prompt_tokens,output_tokens\n1,1,1\n\xff,1,1\n")
    done = CliRunner().invoke(cli, ["play", str(file)])

    assert done.exit_code == 1
    assert done.stderr == f"error: {file}: not UTF-8, at line 1 or below\n"
