"""Shared part of ``tenants apply`` and ``models apply``: topics first, then the records on a control topic."""

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

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
from fairlane_server.kafka.cluster_admin import ClusterAdmin
from fairlane_server.topics.families import TopicFamily, TopicSpec

RecordT = TypeVar("RecordT")


def apply(
    settings: Settings,
    families: Iterable[TopicFamily],
    topics: tuple[TopicSpec, ...],
    control: ControlTopic[RecordT],
    records: Mapping[str, RecordT],
    kind: str,
    *,
    replication_factor: int | None,
    delete: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Create ``topics``, then publish changed records and, with ``delete``, withdraw removed ones; print what was done.

    ``families`` are those whose extra topics are reported. Raises ClusterError.
    """
    cluster = ClusterAdmin(settings)
    made = make_plan(cluster, families, topics, replication_factor)
    applied = carry_out(cluster, made, force=force)
    if not as_json:
        show_applied(applied, len(topics))
    show_findings(made.findings)
    fail_if_any_failed(applied)
    publication = compare(records, control.read())
    withdrawn = publication.unknown if delete else ()
    control.publish(publication.changed.values(), withdrawn)
    if as_json:
        show_json(
            {
                "topics": [applied_json(item) for item in applied],
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
