"""What a cluster holds, and whether it changed only as far as the attackers may change it."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

from deploy.local.layout import KAFKA_LIBS_DIR
from tests.hostile_tenant.connections import Connection
from tests.hostile_tenant.messages import Api, RawRequest, Values, load_messages

_ANY, _EVERYBODY = 1, None
_LATEST, _EARLIEST = -1, -2
_TOPIC_CONFIG, _BROKER_CONFIG = 2, 4
_BROKERS = ("1", "")
"""The one there is, and the default of all."""
_GIVEN = frozenset({1, 2, 3, 7, 8})
"""Sources of settings that somebody gave: of topics, brokers, all brokers, client metrics and groups."""

Partition = tuple[str, int]
Committed = Mapping[tuple[str, str, int], int]


@dataclass(frozen=True, slots=True)
class State:
    """Of everything that an attacker could change.

    Attributes:
        rights: ACLs as Kafka has them.
        users: mechanisms and iterations by name.
        quotas: values by entity.
        topics: ids and numbers of partitions by name.
        settings: those that somebody gave, by kind, name and setting.
        resources: names of groups and client metrics with settings.
        begins, ends: first and next offset of each partition.
        committed: offsets by group, topic and partition.
    """

    rights: frozenset[tuple[Any, ...]]
    users: Mapping[str, tuple[Any, ...]]
    quotas: Mapping[str, Mapping[str, float]]
    topics: Mapping[str, tuple[UUID, int]]
    settings: Mapping[tuple[int, str, str], str]
    resources: frozenset[tuple[int, str]]
    begins: Mapping[Partition, int]
    ends: Mapping[Partition, int]
    committed: Committed


@dataclass(frozen=True, slots=True)
class Allowance:
    """What the attackers may have changed.

    Attributes:
        written: offsets of the records that they were told are taken, by topic.
        shared: topics where more may be, since a transaction of an attacker leaves its mark.
        groups: groups whose offsets they may commit.
    """

    written: Mapping[str, Collection[int]]
    shared: Collection[str]
    groups: Collection[str]


def changes(before: State, after: State, allowance: Allowance) -> Iterator[str]:
    """What is not as it was, and must be. Pure."""
    for what in ("rights", "users", "quotas", "topics", "settings", "resources", "begins"):
        was, now = getattr(before, what), getattr(after, what)
        if was != now:
            yield f"{what}: {_difference(was, now)}"
    for (topic, partition), was in before.ends.items():
        now = after.ends.get((topic, partition), -1)
        written = sum(offset >= was for offset in allowance.written.get(topic, ())) if partition == 0 else 0
        if now < was + written or (now > was + written and topic not in allowance.shared):
            yield f"end of {topic}-{partition}: {was}, now {now}, with {written} records of those who may write it"
    for place in sorted({*before.committed, *after.committed}):
        was, now = before.committed.get(place), after.committed.get(place)
        if was != now and place[0] not in allowance.groups:
            yield f"committed by {place}: {was}, now {now}"


def _difference(was: Any, now: Any) -> str:
    if isinstance(was, Mapping):
        was, now = set(map(str, was.items())), set(map(str, now.items()))
    return f"gone {sorted(map(str, was - now))}, new {sorted(map(str, now - was))}"


class Reader:
    """Reads the state of a cluster over one connection."""

    def __init__(self, connection: Connection, libs: Path = KAFKA_LIBS_DIR) -> None:
        self._connection = connection
        self._messages = load_messages(libs)

    async def read(self, groups: Collection[str]) -> State:
        """``groups``: those whose offsets are read, besides all that the broker lists."""
        topics = await self.topics()
        return State(
            await self._rights(),
            await self._users(),
            await self._quotas(),
            topics,
            await self._settings(topics),
            await self._resources(),
            await self._offsets(topics, _EARLIEST),
            await self._offsets(topics, _LATEST),
            await self._committed({*groups, *await self._groups()}),
        )

    async def topics(self) -> dict[str, tuple[UUID, int]]:
        """Ids and numbers of partitions, but of the topics that the broker makes for itself."""
        answer = await self._ask("Metadata", {"Topics": None, "AllowAutoTopicCreation": False})
        return {
            topic["Name"]: (topic["TopicId"], len(topic["Partitions"]))
            for topic in answer["Topics"]
            if not topic["IsInternal"]
        }

    async def _rights(self) -> frozenset[tuple[Any, ...]]:
        answer = await self._ask(
            "DescribeAcls",
            {
                "ResourceTypeFilter": _ANY,
                "PatternTypeFilter": _ANY,
                "Operation": _ANY,
                "PermissionType": _ANY,
                **dict.fromkeys(("ResourceNameFilter", "PrincipalFilter", "HostFilter"), _EVERYBODY),
            },
        )
        return frozenset(
            (resource["ResourceType"], resource["ResourceName"], resource["PatternType"], *acl.values())
            for resource in answer["Resources"]
            for acl in resource["Acls"]
        )

    async def _users(self) -> dict[str, tuple[Any, ...]]:
        answer = await self._ask("DescribeUserScramCredentials", {"Users": _EVERYBODY})
        return {
            one["User"]: tuple((info["Mechanism"], info["Iterations"]) for info in one["CredentialInfos"])
            for one in answer["Results"]
        }

    async def _quotas(self) -> dict[str, dict[str, float]]:
        answer = await self._ask("DescribeClientQuotas", {"Components": (), "Strict": False})
        return {
            str([tuple(part.values()) for part in entry["Entity"]]): {
                value["Key"]: value["Value"] for value in entry["Values"]
            }
            for entry in answer["Entries"]
        }

    async def _settings(self, topics: Collection[str]) -> dict[tuple[int, str, str], str]:
        resources = [(_TOPIC_CONFIG, topic) for topic in topics] + [(_BROKER_CONFIG, name) for name in _BROKERS]
        wanted = [{"ResourceType": kind, "ResourceName": name, "ConfigurationKeys": None} for kind, name in resources]
        answer = await self._ask("DescribeConfigs", {"Resources": wanted})
        return {
            (found["ResourceType"], found["ResourceName"], setting["Name"]): setting["Value"]
            for found in answer["Results"]
            for setting in found["Configs"]
            if setting["ConfigSource"] in _GIVEN
        }

    async def _resources(self) -> frozenset[tuple[int, str]]:
        answer = await self._ask("ListConfigResources", {})
        return frozenset(
            (one["ResourceType"], one["ResourceName"])
            for one in answer["ConfigResources"]
            if one["ResourceType"] != _TOPIC_CONFIG
        )

    async def _offsets(self, topics: Mapping[str, tuple[UUID, int]], at: int) -> dict[Partition, int]:
        wanted = [
            {
                "Name": topic,
                "Partitions": [{"PartitionIndex": partition, "Timestamp": at} for partition in range(partitions)],
            }
            for topic, (_, partitions) in topics.items()
        ]
        answer = await self._ask("ListOffsets", {"ReplicaId": -1, "Topics": wanted, "TimeoutMs": 30_000})
        return {
            (topic["Name"], partition["PartitionIndex"]): partition["Offset"]
            for topic in answer["Topics"]
            for partition in topic["Partitions"]
        }

    async def _groups(self) -> set[str]:
        return {group["GroupId"] for group in (await self._ask("ListGroups", {}))["Groups"]}

    async def _committed(self, groups: Collection[str]) -> dict[tuple[str, str, int], int]:
        wanted = [{"GroupId": group, "Topics": None} for group in sorted(groups)]
        # The last version with names of topics.
        answer = await self._ask("OffsetFetch", {"Groups": wanted}, version=9)
        return {
            (group["GroupId"], topic["Name"], partition["PartitionIndex"]): partition["CommittedOffset"]
            for group in answer["Groups"]
            for topic in group["Topics"]
            for partition in topic["Partitions"]
        }

    async def _ask(self, name: str, values: Values, *, version: int | None = None) -> dict[str, Any]:
        api = Api.named(self._messages, name)
        newest = self._connection.versions[api.request.key].common(api.request.versions).last
        return await self._connection.ask(RawRequest(api, newest if version is None else version, values))
