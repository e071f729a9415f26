"""Names of topics, consumer groups and transactional ids, and the patterns of valid names. No other module spells them.

Each of them begins with ``TOPIC_PREFIX``, so that pipelines with different prefixes share a Kafka cluster without
seeing each other. Names in records (``reply_to``, source coordinates, audit events) are the whole names.
"""

import os
import re

TENANT_PATTERN = re.compile(r"[a-z0-9][a-z0-9-]{0,38}")
MODEL_PATTERN = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
MOST_REFERENCE_CHARS = 129
"""Longest reference of a model: its name, a separator and a version or alias."""
_REQUEST_ID = re.compile(r"[0-9a-fA-F]{8}(-?[0-9a-fA-F]{4}){3}-?[0-9a-fA-F]{12}")
_TOPIC_PREFIX = re.compile(r"[a-z0-9.-]{0,40}")
_FIRST_PARTS = (
    *("requests", "backfill", "replies", "returned", "chunks", "dead-letter"),
    *("priority", "control", "ledger", "gateway", "jobs", "evaluation"),
)


def valid_topic_prefix(given: str) -> str:
    """``given``, if it is a valid TOPIC_PREFIX; it is used as it is, with or without a dot at its end.

    Without the first part of a topic's name in it, no topic of a pipeline is a topic of one with another prefix.

    Raises:
        ValueError: it has other characters or more than 40, or holds the first part of a topic's name with its dot.
    """
    if _TOPIC_PREFIX.fullmatch(given) is None:
        raise ValueError(
            f"TOPIC_PREFIX is {given!r}: it may have at most 40 characters, of lower-case letters, digits, dots and "
            "hyphens"
        )
    for part in _FIRST_PARTS:
        if f"{part}." in given:
            raise ValueError(
                f"TOPIC_PREFIX is {given!r}: it must not contain {part + '.'!r}, with which topics of a pipeline "
                "without a prefix begin"
            )
    return given


TOPIC_PREFIX = valid_topic_prefix(os.environ.get("TOPIC_PREFIX", ""))
"""What the name of every topic, group and transactional id of this process begins with. Read once, at import."""


def topic_name(name: str) -> str:
    """Whole name of a topic that topics.yaml calls ``name``."""
    return TOPIC_PREFIX + name


def group_id(name: str) -> str:
    """Whole id of the consumer group ``name``."""
    return TOPIC_PREFIX + name


DEAD_LETTER_REQUESTS = topic_name("dead-letter.requests")
DEAD_LETTER_WORK = topic_name("dead-letter.work")
CONTROL_TENANTS = topic_name("control.tenants")
CONTROL_MODELS = topic_name("control.models")
CONTROL_PRICES = topic_name("control.prices")
CONTROL_CAPACITY = topic_name("control.capacity")
CONTROL_DISPATCH = topic_name("control.dispatch")
CONTROL_CANCELLATIONS = topic_name("control.cancellations")
LEDGER_USAGE = topic_name("ledger.usage")
LEDGER_AUDIT = topic_name("ledger.audit")
LEDGER_FEEDBACK = topic_name("ledger.feedback")
GATEWAY_REPLIES = topic_name("gateway.replies")
JOBS_REPLIES = topic_name("jobs.replies")
EVALUATION_WORK = topic_name("evaluation.work")
EVALUATION_REPLIES = topic_name("evaluation.replies")
EVALUATION_TENANT = "_evaluation"
"""Tenant of copies that run for evaluation, in the ledgers and metrics. It cannot be the name of a tenant."""
SHARED_REPLIES = frozenset({GATEWAY_REPLIES, JOBS_REPLIES})
"""Reply topics shared by all tenants: of the gateway and of offline jobs."""

RECORDED_TOPICS = tuple(
    # Only dots: the other characters of a prefix mean themselves in every dialect of regular expressions.
    "^" + TOPIC_PREFIX.replace(".", r"\.") + pattern
    for pattern in (
        r"replies\..*",
        r"(gateway|jobs|evaluation)\.replies$",
        r"ledger\.(usage|audit|feedback)$",
        r"control\.(tenants|models)$",
    )
)
"""Patterns of the topics that the recorder reads, in the notation of ``Consumer.subscribe``."""

DEAD_LETTER_REPLAY_IDS = TOPIC_PREFIX + "fairlane-dead-letter-replay."
"""Beginning of the transactional ids of replays of dead letters."""

MODEL_CHANGES_ID = TOPIC_PREFIX + "fairlane-model-changes"
"""Transactional id of changes of the published models: the latest to start fences the others, so that no two decide on
the same records."""

_REQUESTS = topic_name("requests.")
BACKFILL_PREFIX = topic_name("backfill.")
_REPLIES = topic_name("replies.")
_CHUNKS = topic_name("chunks.")
_RETURNED = topic_name("returned.")
_DEAD_LETTER_REPLIES = topic_name("dead-letter.replies.")
PRIORITY_PREFIX = topic_name("priority.")


def is_name(value: str) -> bool:
    """Whether ``value`` is a valid name of a tenant, service or pool."""
    return TENANT_PATTERN.fullmatch(value) is not None


def is_model_name(value: str) -> bool:
    """Whether ``value`` is a valid model name."""
    return MODEL_PATTERN.fullmatch(value) is not None


def is_request_id(value: str) -> bool:
    """Whether ``value`` is a valid request id: a UUID, with or without hyphens."""
    return _REQUEST_ID.fullmatch(value) is not None


def requests_topic(tenant: str) -> str:
    return _REQUESTS + tenant


def backfill_topic(tenant: str) -> str:
    return BACKFILL_PREFIX + tenant


def replies_topic(tenant: str, service: str | None = None) -> str:
    return f"{_REPLIES}{tenant}" if service is None else f"{_REPLIES}{tenant}.{service}"


def chunks_topic(tenant: str) -> str:
    return _CHUNKS + tenant


def tenant_of_chunks(topic: str) -> str:
    """Tenant of a chunk topic."""
    return topic.removeprefix(_CHUNKS)


def dead_letter_replies_topic(tenant: str) -> str:
    """Topic of replies that a tenant's own services cannot handle."""
    return f"{_DEAD_LETTER_REPLIES}{tenant}"


def priority_topic(pool: str, priority_class: str) -> str:
    return f"{PRIORITY_PREFIX}{pool}.{priority_class}"


def pool_of_priority(topic: str) -> tuple[str, str]:
    """Pool and priority class of a priority topic. Raises ValueError for any other topic."""
    pool, _, priority_class = topic.removeprefix(PRIORITY_PREFIX).rpartition(".")
    if topic.startswith(PRIORITY_PREFIX) and is_name(pool) and priority_class:
        return pool, priority_class
    raise ValueError(f"{topic} is no priority topic")


def returned_topic(pool: str) -> str:
    return _RETURNED + pool


def is_priority(topic: str) -> bool:
    """Whether this topic carries a pool's work."""
    return topic.startswith(PRIORITY_PREFIX)


def is_returned(topic: str) -> bool:
    """Whether this is a pool's requeue topic, to which its consumers return work."""
    return topic.startswith(_RETURNED)


def tenant_of_request_topic(topic: str) -> str:
    """Tenant of a request or backfill topic. Raises ValueError for any other topic."""
    for prefix in (_REQUESTS, BACKFILL_PREFIX):
        tenant = topic.removeprefix(prefix)
        if tenant != topic and is_name(tenant):
            return tenant
    raise ValueError(f"{topic} is no tenant's request topic")


def is_read_by_dispatchers(topic: str) -> bool:
    """Whether this is a tenant's request or backfill topic, a pool's requeue topic, or that of evaluation."""
    return topic == EVALUATION_WORK or any(
        topic.startswith(prefix) and is_name(topic.removeprefix(prefix))
        for prefix in (_REQUESTS, BACKFILL_PREFIX, _RETURNED)
    )


def is_backfill(topic: str) -> bool:
    return topic.startswith(BACKFILL_PREFIX)


def is_replies(topic: str) -> bool:
    """Whether this is a reply topic, of one tenant or shared."""
    return topic.startswith(_REPLIES) or topic in SHARED_REPLIES


def is_replies_of(topic: str, tenant: str) -> bool:
    """Whether this is one of the tenant's own reply topics: the tenant's, or that of one of its services."""
    own = replies_topic(tenant)
    if topic == own:
        return True
    service = topic.removeprefix(own + ".")
    return service != topic and is_name(service)


def may_carry_replies_of(topic: str, tenant: str) -> bool:
    """Whether a reply to this tenant may be written to this topic: one of its own or a shared one."""
    return topic in SHARED_REPLIES or is_replies_of(topic, tenant)


# Groups and transactional ids of the services; ``prefix`` is GROUP_PREFIX.


def dispatcher_group(prefix: str) -> str:
    """Consumer group of the dispatchers."""
    return group_id(f"{prefix}.dispatcher")


def dispatcher_archive_group(prefix: str) -> str:
    """Group id under which dispatchers read single replies; nobody joins it."""
    return group_id(f"{prefix}.dispatcher.archive")


def dispatcher_transactional_ids(prefix: str, instance_id: str) -> tuple[str, str]:
    """Transactional ids of a dispatcher, used in turn: the latest in its slot fences its predecessors."""
    return group_id(f"{prefix}.dispatcher.{instance_id}"), group_id(f"{prefix}.dispatcher-2.{instance_id}")


def pool_group(prefix: str, pool: str) -> str:
    """Consumer group of a pool's consumers; with an empty ``pool`` the prefix of all of them."""
    return group_id(f"{prefix}.pool.{pool}")


def consumer_transactional_ids(prefix: str, pool: str, instance_id: str) -> tuple[str, str]:
    """Transactional ids of an inference consumer, used in turn: the latest in its slot fences its predecessors."""
    slot = f"{pool}.{instance_id}"
    return group_id(f"{prefix}.consumer.{slot}"), group_id(f"{prefix}.consumer-2.{slot}")


def recorder_group(prefix: str) -> str:
    """Consumer group of the recorders."""
    return group_id(f"{prefix}.recorder")


def gateway_group(prefix: str) -> str:
    """Consumer group of the gateway's instances."""
    return group_id(f"{prefix}.gateway")


def gateway_chunks_group(prefix: str) -> str:
    """Group id under which the gateway reads chunks; nobody joins it."""
    return group_id(f"{prefix}.gateway.chunks")


def jobs_group(prefix: str) -> str:
    """Group id under which offline jobs look at their reply topic; nobody joins it."""
    return group_id(f"{prefix}.jobs")


def job_group(prefix: str, job_id: str) -> str:
    """Group whose committed offset counts the chunks of an offline job in the log."""
    return group_id(f"{prefix}.job.{job_id}")


def job_transactional_id(prefix: str, job_id: str) -> str:
    """Transactional id of an offline job's publisher: the latest one fences its predecessors."""
    return group_id(f"{prefix}.job.{job_id}")


def log_replay_group(prefix: str, replay: str) -> str:
    """Group whose committed offsets say how far a replay of the log is; nobody joins it. With an empty ``replay`` the
    prefix of all of them."""
    return group_id(f"{prefix}.log-replay.{replay}")


def log_replay_transactional_id(prefix: str, replay: str) -> str:
    """Transactional id of the writer of a replay's copies: the latest one fences its predecessors."""
    return group_id(f"{prefix}.log-replay.{replay}")


def dead_letter_replay_id(tenant: str) -> str:
    """Transactional id of a replay of a tenant's dead letters: the latest to start fences the others, so that no two
    replay the same letter. One for each tenant: a tenant can block a producer that writes its topics."""
    return DEAD_LETTER_REPLAY_IDS + tenant


def observer_group(name: str) -> str:
    """Group id of a reader that joins no group and commits nothing."""
    return group_id(f"fairlane-observer.{name}")


def tenant_group(tenant: str, name: str) -> str:
    """Consumer group of a tenant; with an empty ``name`` the prefix of all of them. The underscore, which is in no
    TOPIC_PREFIX, GROUP_PREFIX or tenant, keeps it apart from the groups of services and of other pipelines."""
    return group_id(f"tenant_{tenant}.{name}")
