"""Routes of models: references, and the rule and the arm of a request. Pure.

A request names a model (``digits``), one of its versions (``digits/2``) or an alias (``digits@candidate``).
"""

import math
import re
from collections.abc import Sequence
from enum import StrEnum
from hashlib import blake2b

from fairlane.records import InferenceRequest, RouteArm, RouteRule

CHAMPION = "champion"
"""The alias of the version that gets the requests of no rule."""

NAMED_VERSION = "version"
"""The arm of requests that name a version themselves. No alias and no arm of a route has this name."""

VERSION_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
ALIAS_PATTERN = re.compile(r"[a-z][a-z0-9_-]{0,63}")

_DRAWS = 2**53
_LEAST_SHARE = 2**-54


class StickyBy(StrEnum):
    """The key of the sticky hash: requests with the same conversation, caller or request id get one arm of a rule."""

    CONVERSATION = "conversation"
    CALLER = "caller"
    REQUEST = "request"


def model_of(reference: str) -> str:
    """The model that a reference names."""
    return reference.partition("@")[0].partition("/")[0]


def version_key(model: str, version: str) -> str:
    """The reference of a version; also its key in the control topic."""
    return f"{model}/{version}"


def rule_for(rules: Sequence[RouteRule], request: InferenceRequest, tenant: str, now_ms: int) -> RouteRule | None:
    """The first rule whose conditions the request meets."""
    for rule in rules:
        if (
            (not rule.tenants or tenant in rule.tenants)
            and (not rule.callers or request.requested_by in rule.callers)
            and (not rule.tasks or request.task in rule.tasks)
            and (rule.from_ms is None or now_ms >= rule.from_ms)
            and (rule.until_ms is None or now_ms < rule.until_ms)
        ):
            return rule
    return None


def arm_for(rule: RouteRule, request: InferenceRequest, tenant: str) -> RouteArm:
    """The arm of a rule for this request: the same for all that share its sticky key.

    Weighted rendezvous hashing (Schindelhauer and Schomaker 2005): with changed percentages, a key moves only to an arm
    that got a larger part, whatever the order of the arms.
    """
    sticky = sticky_key(rule.sticky_by, request)
    return max(rule.arms, key=lambda arm: _score(arm, f"{rule.rule}\0{arm.arm}\0{tenant}\0{sticky}"))


def sticky_digest(rule: RouteRule, request: InferenceRequest, tenant: str) -> str:
    """The same for all requests that a rule keeps on one arm, and says nothing of them: 16 hexadecimal digits."""
    return blake2b(f"{rule.rule}\0{tenant}\0{sticky_key(rule.sticky_by, request)}".encode(), digest_size=8).hexdigest()


def share_of(key: str) -> float:
    """A number from 0 to below 1 for a key, always the same and else evenly spread."""
    return (int.from_bytes(blake2b(key.encode(), digest_size=8).digest()) >> 11) / _DRAWS


def sticky_key(sticky_by: str, request: InferenceRequest) -> str:
    """What a request shares with all others that are to be treated alike."""
    if sticky_by == StickyBy.CONVERSATION and request.conversation_id is not None:
        return f"conversation:{request.conversation_id}"
    if sticky_by == StickyBy.CALLER and request.requested_by is not None:
        return request.requested_by
    return f"request:{request.request_id}"


def _score(arm: RouteArm, key: str) -> float:
    if arm.percent <= 0:
        return 0.0
    return -arm.percent / math.log(share_of(key) or _LEAST_SHARE)
