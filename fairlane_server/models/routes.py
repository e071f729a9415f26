"""Routes of models: the version that a request gets, and the check of a route. Pure.

A request names a model (``digits``), one of its versions (``digits/2``) or an alias (``digits@candidate``).
"""

import math
import re
from collections.abc import Collection, Iterator, Sequence
from enum import StrEnum
from hashlib import blake2b

from fairlane.names import MODEL_PATTERN, is_model_name
from fairlane.outcomes import Task
from fairlane.records import InferenceRequest, ModelRoute, RouteArm, RouteRule

CHAMPION = "champion"
"""The alias of the version that gets the requests of no rule."""

NAMED_VERSION = "version"
"""The arm of requests that name a version themselves. No alias and no arm of a route has this name."""

VERSION_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
ALIAS_PATTERN = re.compile(r"[a-z][a-z0-9_-]{0,63}")

MOST_RULES = 64
MOST_ARMS = 16
"""Of one rule."""
MOST_CONDITION_VALUES = 1_000

_MISNAMED = "{!r} is no name: it must match " + ALIAS_PATTERN.pattern.replace("{", "{{").replace("}", "}}")
_PERCENT_SLACK = 1e-6
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
    sticky = _sticky_key(rule, request)
    return max(rule.arms, key=lambda arm: _score(arm, f"{rule.rule}\0{arm.arm}\0{tenant}\0{sticky}"))


def share_of(key: str) -> float:
    """A number from 0 to below 1 for a key, always the same and else evenly spread."""
    return (int.from_bytes(blake2b(key.encode(), digest_size=8).digest()) >> 11) / _DRAWS


def _sticky_key(rule: RouteRule, request: InferenceRequest) -> str:
    if rule.sticky_by == StickyBy.CONVERSATION and request.conversation_id is not None:
        return f"conversation:{request.conversation_id}"
    if rule.sticky_by == StickyBy.CALLER and request.requested_by is not None:
        return request.requested_by
    return f"request:{request.request_id}"


def _score(arm: RouteArm, key: str) -> float:
    if arm.percent <= 0:
        return 0.0
    return -arm.percent / math.log(share_of(key) or _LEAST_SHARE)


def check_route(key: str, route: ModelRoute, versions: Collection[str] | None = None) -> None:
    """Check a whole route. ``versions`` are those of its model; None: not known here. Raises ValueError with the field
    and the reason."""
    problem = next(_problems(key, route, versions), None)
    if problem is not None:
        raise ValueError(problem)


def _problems(key: str, route: ModelRoute, versions: Collection[str] | None) -> Iterator[str]:
    if route.model != key or not is_model_name(key):
        yield f"model: {route.model!r} under the key {key!r} (a name matches {MODEL_PATTERN.pattern})"
    if route.revision < 1:
        yield f"revision: {route.revision} is less than 1"
    yield from _problems_of_aliases(route, versions)
    yield from (f"stopped: {problem}" for one in route.stopped for problem in _unknown(one, versions))
    if len(route.rules) > MOST_RULES:
        yield f"rules: {len(route.rules)} are more than {MOST_RULES}"
    names = [rule.rule for rule in route.rules]
    if len(set(names)) < len(names):
        yield "rules: two have the same name"
    for rule in route.rules:
        for problem in _problems_of_rule(rule, route, versions):
            yield f"rules.{rule.rule}: {problem}"


def _problems_of_aliases(route: ModelRoute, versions: Collection[str] | None) -> Iterator[str]:
    for alias, version in route.aliases.items():
        if not _is_arm_name(alias):
            yield f"aliases: {_MISNAMED.format(alias)}"
        yield from (f"aliases.{alias}: {problem}" for problem in _unknown(version, versions))
    if CHAMPION not in route.aliases:
        yield f"aliases: {CHAMPION} is missing"
    elif route.aliases[CHAMPION] in route.stopped:
        yield f"stopped: {route.aliases[CHAMPION]!r} is the {CHAMPION}"


def _problems_of_rule(rule: RouteRule, route: ModelRoute, versions: Collection[str] | None) -> Iterator[str]:
    if ALIAS_PATTERN.fullmatch(rule.rule) is None:
        yield _MISNAMED.format(rule.rule)
    if rule.sticky_by not in tuple(StickyBy):
        yield f"sticky_by: {rule.sticky_by!r} is none of {', '.join(StickyBy)}"
    for task in rule.tasks:
        if task not in tuple(Task):
            yield f"tasks: {task!r} is none of {', '.join(Task)}"
    if rule.from_ms is not None and rule.until_ms is not None and rule.from_ms >= rule.until_ms:
        yield "until_ms: not after from_ms"
    for name, values in (("tenants", rule.tenants), ("callers", rule.callers)):
        if len(values) > MOST_CONDITION_VALUES:
            yield f"{name}: {len(values)} are more than {MOST_CONDITION_VALUES}"
    if not 1 <= len(rule.arms) <= MOST_ARMS:
        yield f"arms: {len(rule.arms)} instead of 1 to {MOST_ARMS}"
    names = [arm.arm for arm in rule.arms]
    if len(set(names)) < len(names):
        yield "arms: two have the same name"
    for arm in rule.arms:
        yield from (f"arms.{arm.arm}: {problem}" for problem in _problems_of_arm(arm, route, versions))
    total = sum(arm.percent for arm in rule.arms)
    if not abs(total - 100) <= _PERCENT_SLACK:
        yield f"arms: the percentages add up to {total:g}, not to 100"


def _problems_of_arm(arm: RouteArm, route: ModelRoute, versions: Collection[str] | None) -> Iterator[str]:
    if not _is_arm_name(arm.arm):
        yield _MISNAMED.format(arm.arm)
    if not 0 <= arm.percent <= 100:
        yield f"percent: {arm.percent:g} is not from 0 to 100"
    if arm.target.startswith("@"):
        if arm.target[1:] not in route.aliases:
            yield f"target: unknown alias {arm.target!r}; known: {', '.join(sorted(route.aliases)) or 'none'}"
    else:
        yield from (f"target: {problem}" for problem in _unknown(arm.target, versions))


def _is_arm_name(name: str) -> bool:
    return name != NAMED_VERSION and ALIAS_PATTERN.fullmatch(name) is not None


def _unknown(version: str, versions: Collection[str] | None) -> Iterator[str]:
    if versions is not None and version not in versions:
        yield f"unknown version {version!r}; known: {', '.join(sorted(versions)) or 'none'}"
