"""``fairlane audit`` without a database: help, and mistakes that are seen before one is asked."""

import pytest

from fairlane_server.cli import main


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["audit", *arguments])
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_help_names_the_filters(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    text = capsys.readouterr().out
    assert all(option in text for option in ("--tenant", "--deployment", "--event", "--author", "--since", "--json"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--tenant acme --deployment", "exclude one another"),
        ("--tenant Acme", "no tenant can have this name"),
        ("--since soon", "--since soon: neither a time"),
        ("--limit 0", "--limit"),
    ],
)
def test_a_mistake_is_one_line(capsys: pytest.CaptureFixture[str], arguments: str, said: str) -> None:
    assert run(*arguments.split()) == 1
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert said in captured.err
