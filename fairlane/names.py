"""Names of topics, and what a name must look like. Nothing else in the project spells a topic."""

import re

TENANT_PATTERN = re.compile(r"[a-z0-9][a-z0-9-]{0,38}")
DEAD_LETTER_REQUESTS = "dead-letter.requests"
DEAD_LETTER_WORK = "dead-letter.work"
CONTROL_TENANTS = "control.tenants"
CONTROL_MODELS = "control.models"
CONTROL_CAPACITY = "control.capacity"
LEDGER_USAGE = "ledger.usage"
LEDGER_AUDIT = "ledger.audit"

_REQUESTS = "requests."
_BACKFILL = "backfill."
_REPLIES = "replies."


def is_name(value: str) -> bool:
    """Whether this can name a tenant, a service or a pool."""
    return TENANT_PATTERN.fullmatch(value) is not None


def requests_topic(tenant: str) -> str:
    return _REQUESTS + tenant


def backfill_topic(tenant: str) -> str:
    return _BACKFILL + tenant


def replies_topic(tenant: str, service: str | None = None) -> str:
    return f"{_REPLIES}{tenant}" if service is None else f"{_REPLIES}{tenant}.{service}"


def chunks_topic(tenant: str) -> str:
    return f"chunks.{tenant}"


def priority_topic(pool: str, priority_class: str) -> str:
    return f"priority.{pool}.{priority_class}"


def tenant_of_source(topic: str) -> str:
    """The tenant whose request topic this is. Raises ValueError for any other topic."""
    for prefix in (_REQUESTS, _BACKFILL):
        tenant = topic.removeprefix(prefix)
        if tenant != topic and is_name(tenant):
            return tenant
    raise ValueError(f"{topic} is no tenant's request topic")


def is_backfill(topic: str) -> bool:
    return topic.startswith(_BACKFILL)


def is_replies(topic: str) -> bool:
    """Whether this is anybody's reply topic."""
    return topic.startswith(_REPLIES)


def is_replies_of(topic: str, tenant: str) -> bool:
    """Whether this is one of the tenant's own reply topics: the literal name, or the name and one service."""
    own = replies_topic(tenant)
    if topic == own:
        return True
    service = topic.removeprefix(own + ".")
    return service != topic and is_name(service)
