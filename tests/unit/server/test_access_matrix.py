"""Every operation on every kind of resource by every user, against a table that was written by hand."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import pytest

from fairlane.records import ModelVersion, TenantSpec
from fairlane_server.access.rights import Grant, Operation, Resource, is_allowed, wanted_grants
from fairlane_server.access.users import KafkaUser, first_users
from fairlane_server.topics.families import expand, load_families

TENANTS = (TenantSpec("acme", services=("search",)), TenantSpec("acme2", services=("search",)))
MODELS = tuple(
    ModelVersion(f"model-{pool}", "1", pool, "simulated", ("generate",), "-", 100, 100) for pool in ("fast", "fast-2")
)

NAMES: Mapping[Resource, Sequence[str]] = {
    Resource.TOPIC: (
        *("requests.acme", "requests.acme2", "backfill.acme", "backfill.acme2", "chunks.acme", "chunks.acme2"),
        *("replies.acme", "replies.acme.search", "replies.acme2", "replies.acme2.search"),
        *("dead-letter.replies.acme", "dead-letter.replies.acme2", "dead-letter.requests", "dead-letter.work"),
        *("priority.fast.high", "priority.fast.normal", "priority.fast.low", "returned.fast"),
        *("priority.fast-2.high", "priority.fast-2.normal", "priority.fast-2.low", "returned.fast-2"),
        *("evaluation.work", "evaluation.replies"),
        *("gateway.replies", "jobs.replies", "ledger.usage", "ledger.audit", "ledger.feedback"),
        *("control.tenants", "control.models", "control.prices"),
        *("control.capacity", "control.dispatch", "control.cancellations"),
        # Nobody's, or those of somebody who is still to come.
        *("requests.newcomer", "replies.acme-2", "priority.other.high", "control.other", "ledger.other"),
        *("gateway.replies2", "dead-letter.requests2", "__consumer_offsets", "requests", "other"),
    ),
    Resource.GROUP: (
        *("fairlane.dispatcher", "fairlane.dispatcher.archive", "fairlane.gateway", "fairlane.gateway.chunks"),
        *("fairlane.recorder", "fairlane.jobs", "fairlane.job.j1", "fairlane.pool.fast", "fairlane.pool.fast-2"),
        "fairlane.log-replay.r1",
        *("fairlane-observer.top", "tenant_acme.readers", "tenant_acme2.readers", "tenant_acme", "fairlane", "other"),
    ),
    Resource.TRANSACTIONAL_ID: (
        *("fairlane.dispatcher.1", "fairlane.dispatcher-2.1", "fairlane.consumer.fast.1", "fairlane.consumer-2.fast.1"),
        *("fairlane.consumer.fast-2.1", "fairlane.consumer-2.fast-2.1", "fairlane.job.j1", "fairlane.log-replay.r1"),
        *("fairlane-dead-letter-replay.acme", "fairlane-model-changes", "tenant_acme.writer", "fairlane.gateway.1"),
        "other",
    ),
    Resource.CLUSTER: ("kafka-cluster",),
}

_ALL_REPLIES = "replies.* gateway.replies jobs.replies"
_OF_PLACES = "requests.* backfill.* priority.* returned.* replies.* chunks.* dead-letter.replies.*"
_EVERY_TOPIC = (
    f"{_OF_PLACES} {_ALL_REPLIES} dead-letter.requests dead-letter.work control.tenants control.models control.prices "
    "control.capacity control.dispatch control.cancellations ledger.usage ledger.audit "
    "ledger.feedback evaluation.work evaluation.replies"
)
_LETTERS = "dead-letter.requests dead-letter.work"
_OBSERVERS = "fairlane-observer.*"


@dataclass(frozen=True, slots=True)
class Expected:
    """What one user may do: patterns of names by operation. What another operation includes is not repeated."""

    topics: Mapping[Operation, str]
    groups: Mapping[Operation, str]
    ids: str = ""
    cluster: frozenset[Operation] = frozenset()


READ, WRITE, DESCRIBE = Operation.READ, Operation.WRITE, Operation.DESCRIBE


def _of_tenant(name: str) -> Expected:
    return Expected(
        {
            READ: f"replies.{name} replies.{name}.* chunks.{name} dead-letter.replies.{name}",
            WRITE: f"requests.{name} backfill.{name} dead-letter.replies.{name}",
        },
        {READ: f"tenant_{name}.*"},
    )


def _of_pool(name: str) -> Expected:
    return Expected(
        {
            READ: f"priority.{name}.* control.models control.prices control.capacity control.cancellations",
            WRITE: f"returned.{name} {_ALL_REPLIES} chunks.* dead-letter.work control.capacity ledger.usage "
            "ledger.audit evaluation.replies",
        },
        {READ: f"fairlane.pool.{name}", DESCRIBE: _OBSERVERS},
        f"fairlane.consumer.{name}.* fairlane.consumer-2.{name}.*",
    )


EXPECTED: Mapping[str, Expected] = {
    "fairlane_dispatcher": Expected(
        {
            READ: f"requests.* backfill.* priority.* returned.* {_ALL_REPLIES} control.tenants control.models "
            "control.prices control.capacity control.dispatch ledger.usage evaluation.work",
            WRITE: f"priority.* {_ALL_REPLIES} dead-letter.requests control.dispatch control.cancellations "
            "ledger.usage ledger.audit ledger.feedback evaluation.work evaluation.replies",
        },
        {READ: "fairlane.dispatcher", DESCRIBE: f"fairlane.dispatcher.archive fairlane.pool.* {_OBSERVERS}"},
        "fairlane.dispatcher.* fairlane.dispatcher-2.*",
    ),
    "fairlane_gateway": Expected(
        {
            READ: "gateway.replies chunks.* control.tenants control.models control.capacity control.dispatch",
            WRITE: "requests.*",
            DESCRIBE: "jobs.replies",
        },
        {READ: "fairlane.gateway", DESCRIBE: f"fairlane.gateway.chunks {_OBSERVERS}"},
    ),
    "fairlane_backfill": Expected(
        {READ: "jobs.replies control.tenants control.prices", WRITE: "backfill.*"},
        {READ: "fairlane.job.*", DESCRIBE: f"fairlane.jobs {_OBSERVERS}"},
        "fairlane.job.*",
    ),
    "fairlane_recorder": Expected(
        {
            READ: f"{_ALL_REPLIES} control.tenants control.models ledger.usage ledger.audit ledger.feedback "
            "evaluation.replies "
            # Single items, for labelling.
            "priority.*"
        },
        {READ: "fairlane.recorder", DESCRIBE: _OBSERVERS},
    ),
    "fairlane_operator": Expected(
        {
            READ: f"{_LETTERS} control.tenants control.models control.prices control.capacity control.dispatch "
            "ledger.audit",
            WRITE: "control.tenants control.models control.prices",
            **dict.fromkeys(
                (
                    *(Operation.CREATE, Operation.DELETE, Operation.ALTER),
                    *(Operation.ALTER_CONFIGS, Operation.DESCRIBE_CONFIGS),
                ),
                _EVERY_TOPIC,
            ),
        },
        {DESCRIBE: _OBSERVERS},
        "fairlane-model-changes",
        cluster=frozenset({Operation.DESCRIBE_CONFIGS}),
    ),
    "fairlane_replayer": Expected(
        {READ: _LETTERS, WRITE: f"requests.* backfill.* {_LETTERS} ledger.audit"},
        {DESCRIBE: _OBSERVERS},
        "fairlane-dead-letter-replay.*",
    ),
    "fairlane_admin": Expected(
        {
            # Work, for replays of the log.
            READ: f"{_LETTERS} control.tenants control.models control.capacity control.dispatch priority.*",
            WRITE: f"requests.* backfill.* {_LETTERS} control.tenants control.models ledger.audit evaluation.work",
            Operation.CREATE: _OF_PLACES,
            DESCRIBE: _OF_PLACES,
            Operation.DELETE: _LETTERS,
        },
        {READ: "fairlane.log-replay.*", DESCRIBE: _OBSERVERS},
        "fairlane-dead-letter-replay.* fairlane-model-changes fairlane.log-replay.*",
        frozenset({Operation.DESCRIBE_CONFIGS}),
    ),
    # Kafka UI: of tenants, and of what failed of theirs, it reads nothing.
    "fairlane_viewer": Expected(
        {
            READ: "control.tenants control.models control.prices control.capacity control.dispatch",
            DESCRIBE: _EVERY_TOPIC,
            Operation.DESCRIBE_CONFIGS: _EVERY_TOPIC,
        },
        {
            DESCRIBE: "fairlane.dispatcher fairlane.gateway fairlane.recorder fairlane.pool.* fairlane.job.* "
            "fairlane.log-replay.* "
            f"{_OBSERVERS}"
        },
        cluster=frozenset({Operation.DESCRIBE_CONFIGS}),
    ),
    "fairlane_consumer_fast": _of_pool("fast"),
    "fairlane_consumer_fast-2": _of_pool("fast-2"),
    "fairlane_tenant_acme": _of_tenant("acme"),
    "fairlane_tenant_acme2": _of_tenant("acme2"),
}
INCLUDED_IN = {
    DESCRIBE: (READ, WRITE, Operation.DELETE, Operation.ALTER),
    Operation.DESCRIBE_CONFIGS: (Operation.ALTER_CONFIGS,),
}
"""Kafka's rule: who may do one of these may do that as well."""

FAMILIES = load_families()
USERS = first_users([spec.tenant for spec in TENANTS], [model.pool for model in MODELS])


def is_expected(expected: Expected, operation: Operation, resource: Resource, name: str) -> bool:
    for one in (operation, *INCLUDED_IN.get(operation, ())):
        match resource:
            case Resource.TOPIC:
                patterns = expected.topics.get(one, "")
            case Resource.GROUP:
                patterns = expected.groups.get(one, "")
            case Resource.TRANSACTIONAL_ID:
                patterns = expected.ids if one is WRITE else ""
            case _:
                patterns = name if one in expected.cluster else ""
        if any(fnmatchcase(name, pattern) for pattern in patterns.split()):
            return True
    return False


def deviations(grants: frozenset[Grant], user: str) -> Iterator[str]:
    for resource, names in NAMES.items():
        for name in names:
            for operation in Operation:
                allowed = is_allowed(grants, user, operation, resource, name)
                if allowed is not is_expected(EXPECTED[user], operation, resource, name):
                    yield f"{user} {'may' if allowed else 'may not'} {operation} {resource} {name}"


def test_the_table_names_every_user_and_every_topic() -> None:
    assert {user.name for user in USERS} == EXPECTED.keys()
    assert {topic.name for topic in expand(FAMILIES, TENANTS, MODELS)} <= {*NAMES[Resource.TOPIC]}
    assert {*NAMES} == {*Resource} - {Resource.UNKNOWN}


@pytest.mark.parametrize("user", USERS, ids=lambda user: user.name)
def test_every_user_may_do_what_the_table_says_and_nothing_else(user: KafkaUser) -> None:
    grants = wanted_grants(FAMILIES, USERS, "fairlane")
    assert list(deviations(grants, user.name)) == []
    # A second user, and no other one, has the same rights.
    assert {one.operation for one in wanted_grants(FAMILIES, [user.other], "fairlane")} == {
        one.operation for one in grants if one.user == user.name
    }


@pytest.mark.parametrize(
    ("operation", "resource", "name"),
    [
        (Operation.DELETE, Resource.TOPIC, "replies.acme"),
        (Operation.ALTER_CONFIGS, Resource.TOPIC, "ledger.usage"),
        (Operation.DESCRIBE, Resource.TOPIC, "requests.acme2"),
        (Operation.DELETE, Resource.GROUP, "tenant_acme.readers"),
        (Operation.ALTER, Resource.CLUSTER, "kafka-cluster"),
        (Operation.ALL, Resource.TRANSACTIONAL_ID, "other"),
    ],
)
def test_a_right_too_many_would_be_found(operation: Operation, resource: Resource, name: str) -> None:
    user = "fairlane_tenant_acme"
    grants = wanted_grants(FAMILIES, USERS, "fairlane") | {Grant(user, resource, name, False, operation)}
    assert f"{user} may {operation} {resource} {name}" in list(deviations(grants, user))


def test_a_right_that_is_missing_would_be_found() -> None:
    grants = wanted_grants(FAMILIES, USERS, "fairlane")
    needed = [one for one in grants if one.operation not in INCLUDED_IN]
    assert len(needed) > 100
    for grant in needed:
        assert any("may not" in found for found in deviations(grants - {grant}, grant.user)), grant
