"""``fairlane keys`` and ``fairlane users`` without a database: help, and mistakes that are seen before one is asked."""

import pytest

from fairlane_server.api_keys.api_key import Role, Scope
from fairlane_server.cli import main


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.mark.parametrize(
    "command",
    ["keys create", "keys list", "keys revoke", "keys rotate", "keys bar", "keys readmit", "users set", "users list"],
)
def test_every_command_has_help_and_json(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert run(*command.split(), "--help") == 0
    text = capsys.readouterr().out
    assert f"Usage: fairlane {command} [OPTIONS]" in " ".join(text.split())
    assert "--json" in text


def test_help_names_every_role_and_scope(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("keys", "create", "--help") == 0
    text = capsys.readouterr().out
    for name in (*Role, *Scope):
        assert name.value in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("keys create --tenant acme", "--name"),
        ("keys create --name n", "--tenant"),
        ("keys create --tenant Acme --name n", "--tenant Acme: no tenant can have this name"),
        ("keys create --tenant acme --name n --role root", "root"),
        ("keys create --tenant acme --name n --scope all", "all"),
        ("keys create --tenant acme --name n --expires soon", "--expires soon: no span"),
        ("keys create --tenant acme --name n --expires 0s", "--expires 0s: no span"),
        ("keys create --tenant acme --name n --expires 99999d", "--expires 99999d: no span"),
        ("keys rotate 0123456789abcdef --overlap -1h", "-1h"),
        ("keys rotate", "KEY_ID"),
        ("keys list --tenant *", "no tenant can have this name"),
        ("keys bar", "--tenant"),
        ("keys bar --tenant _deployment", "no tenant can have this name"),
        ("keys readmit --tenant *", "no tenant can have this name"),
        ("users set u-17", "--tenant"),
        ("keys create --name n --tenant acme --deployment", "--tenant TENANT, or --deployment"),
        ("keys create --tenant acme --name n --role operator", "the roles of a tenant are viewer, tenant"),
        ("keys create --tenant acme --name n --scope audit", "the scopes of a tenant are inference"),
        ("keys create --tenant acme --name n --grant dead_letters:payload", "only identities of the deployment"),
        ("keys create --deployment --name n --role tenant", "the roles of the deployment are viewer, operator, admin"),
        ("users set u-17 --tenant acme --role admin", "the roles of a tenant are viewer, tenant"),
        ("users list --tenant Acme", "no tenant can have this name"),
    ],
)
def test_a_mistake_is_one_line(capsys: pytest.CaptureFixture[str], arguments: str, said: str) -> None:
    assert run(*arguments.split()) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert said in captured.err
