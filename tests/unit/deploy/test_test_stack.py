"""The choice of the servers that the tests run on."""

import pytest

from fairlane_server.postgres.rights import PostgresRole
from tests.kit.stack import EmbeddedStack, StackChoiceError, choose_stack

EXTERNAL = {
    "FAIRLANE_TEST_STACK": "external",
    "KAFKA_BOOTSTRAP_SERVERS": "k:1",
    "POSTGRES_DSN": "postgresql://s@h/d",
    "POSTGRES_OWNER_DSN": "postgresql://o@h/d",
    "REDIS_URL": "redis://h/0",
}


def test_the_embedded_stack_is_chosen_unless_another_is_named() -> None:
    stack = choose_stack({})
    assert isinstance(stack, EmbeddedStack)
    stack.close()


def test_containers_without_a_docker_daemon_are_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    with pytest.raises(StackChoiceError) as raised:
        choose_stack({"FAIRLANE_TEST_STACK": "containers"})
    message = str(raised.value)
    assert message.startswith("FAIRLANE_TEST_STACK=containers needs a Docker daemon, and none answers (")
    assert message.endswith("start one, or use FAIRLANE_TEST_STACK=embedded")
    assert len(message.splitlines()) == 1


def test_external_servers_are_those_of_the_environment() -> None:
    stack = choose_stack(EXTERNAL)
    assert stack.kafka() == "k:1"
    assert stack.redis() == "redis://h/0"
    server = stack.postgres()
    assert (server.owner_dsn, {server.dsn(role) for role in PostgresRole}) == (
        "postgresql://o@h/d",
        {"postgresql://s@h/d"},
    )
    own = choose_stack({**EXTERNAL, "POSTGRES_RECORDER_DSN": "postgresql://r@h/d"}).postgres()
    assert (own.recorder_dsn, own.dispatcher_dsn) == ("postgresql://r@h/d", "postgresql://s@h/d")


@pytest.mark.parametrize("variable", [name for name in EXTERNAL if name != "FAIRLANE_TEST_STACK"])
def test_an_external_server_that_is_not_named_is_asked_for(variable: str) -> None:
    stack = choose_stack({name: value for name, value in EXTERNAL.items() if name != variable})
    with pytest.raises(StackChoiceError, match=f"FAIRLANE_TEST_STACK=external needs {variable}"):
        (stack.kafka(), stack.postgres(), stack.redis())


def test_another_choice_is_refused() -> None:
    with pytest.raises(StackChoiceError, match="FAIRLANE_TEST_STACK=cloud: choose embedded, containers or external"):
        choose_stack({"FAIRLANE_TEST_STACK": "cloud"})
