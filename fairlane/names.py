"""Names of topics and consumer groups, and the patterns of valid names. No other module spells them."""

import re

TENANT_PATTERN = re.compile(r"[a-z0-9][a-z0-9-]{0,38}")
_REQUEST_ID = re.compile(r"[0-9a-fA-F]{8}(-?[0-9a-fA-F]{4}){3}-?[0-9a-fA-F]{12}")
DEAD_LETTER_REQUESTS = "dead-letter.requests"
DEAD_LETTER_WORK = "dead-letter.work"
CONTROL_TENANTS = "control.tenants"
CONTROL_MODELS = "control.models"
CONTROL_CAPACITY = "control.capacity"
CONTROL_DISPATCH = "control.dispatch"
CONTROL_CANCELLATIONS = "control.cancellations"
LEDGER_USAGE = "ledger.usage"
LEDGER_AUDIT = "ledger.audit"
GATEWAY_REPLIES = "gateway.replies"
JOBS_REPLIES = "jobs.replies"
SHARED_REPLIES = frozenset({GATEWAY_REPLIES, JOBS_REPLIES})
"""Reply topics shared by all tenants: of the gateway and of offline jobs."""

_REQUESTS = "requests."
_BACKFILL = "backfill."
_REPLIES = "replies."
_RETURNED = "returned."
_DEAD_LETTER_REPLIES = "dead-letter.replies."
_PRIORITY = "priority."


def is_name(value: str) -> bool:
    """Whether ``value`` is a valid name of a tenant, service or pool."""
    return TENANT_PATTERN.fullmatch(value) is not None


def is_request_id(value: str) -> bool:
    """Whether ``value`` is a valid request id: a UUID, with or without hyphens."""
    return _REQUEST_ID.fullmatch(value) is not None


def requests_topic(tenant: str) -> str:
    return _REQUESTS + tenant


def backfill_topic(tenant: str) -> str:
    return _BACKFILL + tenant


def replies_topic(tenant: str, service: str | None = None) -> str:
    return f"{_REPLIES}{tenant}" if service is None else f"{_REPLIES}{tenant}.{service}"


def chunks_topic(tenant: str) -> str:
    return f"chunks.{tenant}"


def dead_letter_replies_topic(tenant: str) -> str:
    """Topic of replies that a tenant's own services cannot handle."""
    return f"{_DEAD_LETTER_REPLIES}{tenant}"


def priority_topic(pool: str, priority_class: str) -> str:
    return f"{_PRIORITY}{pool}.{priority_class}"


def pool_of_priority(topic: str) -> tuple[str, str]:
    """Pool and priority class of a priority topic. Raises ValueError for any other topic."""
    pool, _, priority_class = topic.removeprefix(_PRIORITY).rpartition(".")
    if topic.startswith(_PRIORITY) and is_name(pool) and priority_class:
        return pool, priority_class
    raise ValueError(f"{topic} is no priority topic")


def returned_topic(pool: str) -> str:
    return _RETURNED + pool


def is_priority(topic: str) -> bool:
    """Whether this topic carries a pool's work."""
    return topic.startswith(_PRIORITY)


def is_returned(topic: str) -> bool:
    """Whether this is a pool's requeue topic, to which its consumers return work."""
    return topic.startswith(_RETURNED)


def tenant_of_request_topic(topic: str) -> str:
    """Tenant of a request or backfill topic. Raises ValueError for any other topic."""
    for prefix in (_REQUESTS, _BACKFILL):
        tenant = topic.removeprefix(prefix)
        if tenant != topic and is_name(tenant):
            return tenant
    raise ValueError(f"{topic} is no tenant's request topic")


def is_read_by_dispatchers(topic: str) -> bool:
    """Whether this is a tenant's request or backfill topic, or a pool's requeue topic."""
    prefix, _, name = topic.partition(".")
    return f"{prefix}." in (_REQUESTS, _BACKFILL, _RETURNED) and is_name(name)


def is_backfill(topic: str) -> bool:
    return topic.startswith(_BACKFILL)


def dispatcher_group(prefix: str) -> str:
    """Consumer group of the dispatchers; ``prefix`` is GROUP_PREFIX."""
    return f"{prefix}.dispatcher"


def pool_group(prefix: str, pool: str) -> str:
    """Consumer group of a pool's consumers; ``prefix`` is GROUP_PREFIX."""
    return f"{prefix}.pool.{pool}"


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


def gateway_group(prefix: str) -> str:
    """Consumer group of the gateway's instances; ``prefix`` is GROUP_PREFIX."""
    return f"{prefix}.gateway"


def job_group(prefix: str, job_id: str) -> str:
    """Group whose committed offset counts the chunks of an offline job in the log; ``prefix`` is GROUP_PREFIX."""
    return f"{prefix}.job.{job_id}"


def job_transactional_id(prefix: str, job_id: str) -> str:
    """Transactional id of an offline job's publisher: the latest one fences its predecessors."""
    return f"{prefix}-job-{job_id}"
