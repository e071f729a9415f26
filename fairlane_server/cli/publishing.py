"""Shared part of ``tenants apply`` and ``models apply``: topics first, then the records on a control topic."""

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from fairlane.cluster import Cluster
from fairlane.schema_registry import codec_for
from fairlane.settings import Settings
from fairlane_server.cli.output import say, show_json, warn
from fairlane_server.cli.topics import (
    applied_json,
    carry_out,
    fail_if_any_failed,
    make_plan,
    show_applied,
    show_findings,
)
from fairlane_server.control.publisher import ControlTopic, compare
from fairlane_server.topics.families import TopicFamily, TopicSpec

RecordT = TypeVar("RecordT")


def create_topics(
    settings: Settings,
    families: Iterable[TopicFamily],
    wanted: tuple[TopicSpec, ...],
    replication_factor: int | None,
    *,
    force: bool,
    as_json: bool,
) -> list[dict[str, object]]:
    """Make these topics as they should be and show what was done; returns the same for JSON."""
    cluster = Cluster(settings)
    made = make_plan(cluster, families, wanted, replication_factor)
    applied = carry_out(cluster, made, force=force)
    if not as_json:
        show_applied(applied, len(wanted))
    show_findings(made.findings)
    fail_if_any_failed(applied)
    return [applied_json(item) for item in applied]


def publish(
    topic: ControlTopic[RecordT],
    wanted: Mapping[str, RecordT],
    kind: str,
    *,
    delete: bool,
    as_json: bool,
    topics_done: list[dict[str, object]],
) -> None:
    """Publish changed entries, withdraw removed ones if asked to, and print the changes. Raises ClusterError."""
    publication = compare(wanted, topic.read())
    withdrawn = publication.unknown if delete else ()
    topic.publish(publication.changed.values(), withdrawn)
    if as_json:
        show_json(
            {
                "topics": topics_done,
                "published": list(publication.changed),
                "unchanged": list(publication.unchanged),
                "unknown": list(publication.unknown),
                "withdrawn": list(withdrawn),
            }
        )
        return
    for name in publication.changed:
        say(f"{kind} {name}: published")
    for name in withdrawn:
        say(f"{kind} {name}: withdrawn")
    say(f"{len(publication.unchanged)} unchanged")
    for name in () if delete else publication.unknown:
        warn(f"{kind} {name} is published but not in the file; --delete withdraws it")


def control_topic(
    settings: Settings, topic: str, record_type: type[RecordT], key_of: Callable[[RecordT], str]
) -> ControlTopic[RecordT]:
    """The control topic with the codec that the settings ask for. Raises RegistryError."""
    return ControlTopic(settings, codec_for(settings), topic, record_type, key_of)
