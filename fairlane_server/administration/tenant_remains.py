"""What is left of a tenant under a name that is not published: whoever gets the name gets that."""

import re
from collections.abc import Iterable, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import Any

from confluent_kafka import IsolationLevel, KafkaException, TopicPartition
from confluent_kafka.admin import OffsetSpec

from fairlane.cluster import reason_of
from fairlane.names import topic_name
from fairlane_server.api_keys.key_store import BARRED_TENANTS
from fairlane_server.kafka.cluster_admin import REQUEST_TIMEOUT_S, ClusterAdmin, ClusterError
from fairlane_server.topics.families import TopicFamily

_MOST_NAMED = 3


@dataclass(frozen=True, slots=True)
class TenantRemains:
    """Of one name.

    Attributes:
        tables: with rows of the tenant.
        topics: that were ever written to.
    """

    tables: Sequence[str] = ()
    topics: Sequence[str] = ()

    def __bool__(self) -> bool:
        return bool(self.tables or self.topics)

    def __str__(self) -> str:
        rows = [table for table in self.tables if table != BARRED_TENANTS]
        parts = ["it is barred"] if BARRED_TENANTS in self.tables else []
        parts += [f"rows in {_some(rows)}"] if rows else []
        parts += [f"topics {_some(self.topics)}"] if self.topics else []
        return ", ".join(parts)


def _some(found: Sequence[str]) -> str:
    more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
    return ", ".join(found[:_MOST_NAMED]) + more


def topics_of_name(families: Iterable[TopicFamily], tenant: str, topics: Iterable[str]) -> list[str]:
    """Those of these topics that are a tenant's of this name."""
    patterns = [
        re.compile(re.escape(topic_name(head)) + rf"{re.escape(tenant)}(\.[^.]+)?")
        for family in families
        for head, placeholder, _ in [family.name.partition("{tenant}")]
        if placeholder
    ]
    return sorted(topic for topic in topics if any(pattern.fullmatch(topic) for pattern in patterns))


def written_topics(cluster: ClusterAdmin, families: Iterable[TopicFamily], tenant: str) -> list[str]:
    """The topics of this name that were ever written to, also if nothing is left in them. A topic that nobody has
    written to is as good as a new one: a creation that failed may be repeated. Raises ClusterError."""
    existing = cluster.metadata().topics
    topics = topics_of_name(families, tenant, existing)
    places = [TopicPartition(topic, partition) for topic in topics for partition in existing[topic].partitions]
    if not places:
        return []
    latest: Any = {place: OffsetSpec.latest() for place in places}  # type: ignore[no-untyped-call]  # without types
    asked = cluster.admin.list_offsets(
        latest, isolation_level=IsolationLevel.READ_UNCOMMITTED, request_timeout=REQUEST_TIMEOUT_S
    )
    written = set()
    for place, future in asked.items():
        try:
            if future.result(REQUEST_TIMEOUT_S).offset > 0:
                written.add(place.topic)
        except KafkaException as error:
            raise ClusterError(f"{place.topic}: its end cannot be read: {reason_of(error)}") from None
        except FutureTimeout:
            raise ClusterError(f"{place.topic}: no answer within {REQUEST_TIMEOUT_S:g} s") from None
    return sorted(written)
