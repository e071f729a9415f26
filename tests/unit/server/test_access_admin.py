"""What a cluster says about users and rights, and what it does not say."""

from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    ConfigResource,
    ResourcePatternType,
    ResourceType,
)

from fairlane.settings import KafkaSettings
from fairlane_server.access import client_quotas
from fairlane_server.access.admin import read_access
from fairlane_server.access.rights import Grant, Operation, Resource
from fairlane_server.kafka.cluster_admin import ClusterError

AUTHORIZER = {"authorizer.class.name": "StandardAuthorizer"}


def answered(value: Any) -> "Future[Any]":
    future: Future[Any] = Future()
    if isinstance(value, BaseException):
        future.set_exception(value)
    else:
        future.set_result(value)
    return future


class Cluster:
    """Answers what it was given."""

    def __init__(
        self,
        *,
        brokers: tuple[int, ...] = (1,),
        config: Mapping[str, str | None] | BaseException = AUTHORIZER,
        acls: Any = (),
        users: Any = None,
    ) -> None:
        self.admin = self
        self._brokers = brokers
        self._config = config
        self._acls = acls
        self._users = {} if users is None else users

    def metadata(self) -> Any:
        return SimpleNamespace(brokers=dict.fromkeys(self._brokers))

    def describe_configs(self, resources: list[ConfigResource], **_: Any) -> "dict[ConfigResource, Future[Any]]":
        given = self._config
        if not isinstance(given, BaseException):
            given = {name: SimpleNamespace(value=value) for name, value in given.items()}  # type: ignore[misc]
        return {resource: answered(given) for resource in resources}

    def describe_acls(self, _everything: Any, **_: Any) -> "Future[Any]":
        return answered(self._acls)

    def describe_user_scram_credentials(self, **_: Any) -> "Future[Any]":
        return answered(self._users)


@pytest.fixture(autouse=True)
def _no_quotas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_quotas, "read_quotas", lambda _settings: {})


def read(cluster: Any) -> Any:
    return read_access(cluster, KafkaSettings())


REFUSED = KafkaException(KafkaError(KafkaError.CLUSTER_AUTHORIZATION_FAILED))


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        (Cluster(brokers=()), "no broker has joined the cluster"),
        (Cluster(config={}), r"the brokers have no authorizer\.class\.name: they check no rights"),
        (Cluster(config={"authorizer.class.name": ""}), r"the brokers have no authorizer\.class\.name"),
        (Cluster(config=FutureTimeout()), "the broker's settings cannot be read: no answer within 25 s"),
        (Cluster(config=REFUSED), "the broker's settings cannot be read: .*authorization failed"),
        (Cluster(users=FutureTimeout()), "users cannot be read: no answer within 25 s"),
        (Cluster(users=REFUSED), "users cannot be read: .*authorization failed"),
        (Cluster(acls=FutureTimeout()), "ACLs cannot be read: no answer within 25 s"),
    ],
)
def test_what_cannot_be_read_is_an_error_of_one_line(cluster: Cluster, message: str) -> None:
    with pytest.raises(ClusterError, match=f"(?i)^{message}[^\n]*$"):
        read(cluster)


@pytest.mark.parametrize(("value", "is_open"), [("true", True), ("false", False), (None, True)])
def test_brokers_may_let_everybody_use_what_no_acl_names(value: str | None, *, is_open: bool) -> None:
    """A hidden value counts as the worse one."""
    config = {**AUTHORIZER, "allow.everyone.if.no.acl.found": value}
    assert read(Cluster(config=config)).allows_unlisted is is_open
    assert read(Cluster()).allows_unlisted is False


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({}, []),
        ({"listeners": "PLAINTEXT://:9092"}, ["PLAINTEXT"]),
        ({"listeners": "sasl_ssl://:9093,SASL_PLAINTEXT://:9094"}, []),
        # The protocol counts, not the name.
        (
            {
                "listeners": "SASL_SSL://:9093, INSIDE://:9092",
                "listener.security.protocol.map": "SASL_SSL:PLAINTEXT,INSIDE:SASL_SSL",
            },
            ["SASL_SSL"],
        ),
        # Certificates of clients are as good as passwords, if they must be shown.
        ({"listeners": "SSL://:9093"}, ["SSL"]),
        ({"listeners": "SSL://:9093", "ssl.client.auth": "requested"}, ["SSL"]),
        ({"listeners": "SSL://:9093", "ssl.client.auth": None}, ["SSL"]),
        ({"listeners": "SSL://:9093", "ssl.client.auth": "required"}, []),
        (
            {
                "listeners": "SSL://:9093",
                "ssl.client.auth": "required",
                "listener.name.ssl.ssl.client.auth": "none",
            },
            ["SSL"],
        ),
        # Of controllers in other processes.
        (
            {
                "listeners": "SASL_SSL://:9093",
                "controller.listener.names": "CONTROLLER",
                "listener.security.protocol.map": "SASL_SSL:SASL_SSL,CONTROLLER:PLAINTEXT",
            },
            ["CONTROLLER"],
        ),
    ],
)
def test_a_listener_that_asks_for_no_password_is_named(config: dict[str, str | None], names: list[str]) -> None:
    assert read(Cluster(config={**AUTHORIZER, **config})).open_listeners == names


def acl(kind: ResourceType, operation: AclOperation, principal: str = "User:u") -> AclBinding:
    return AclBinding(kind, "x", ResourcePatternType.LITERAL, principal, "*", operation, AclPermissionType.ALLOW)


def test_rights_of_newer_brokers_are_read_as_unknown_ones() -> None:
    found = read(
        Cluster(
            acls=[
                acl(ResourceType.TOPIC, AclOperation.UNKNOWN),
                acl(ResourceType.UNKNOWN, AclOperation.DESCRIBE),
                acl(ResourceType.TOPIC, AclOperation.READ, "Group:other"),
            ]
        )
    )
    assert found.grants == {
        Grant("u", Resource.TOPIC, "x", is_prefix=False, operation=Operation.UNKNOWN),
        Grant("u", Resource.UNKNOWN, "x", is_prefix=False, operation=Operation.DESCRIBE),
    }
