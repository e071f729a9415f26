"""The check of a model's route: its aliases, its rules and its rollout. Pure."""

from collections.abc import Collection, Iterator
from itertools import pairwise
from math import inf

from fairlane.evaluation_records import Shadow
from fairlane.names import MODEL_PATTERN, is_model_name
from fairlane.outcomes import Task
from fairlane.records import ModelRoute, RouteArm, RouteRule
from fairlane.rollout_records import Rollout
from fairlane_server.models.rollout_arms import MOST_COMPARED_PERCENT, RESERVED, RolloutStatus, is_active
from fairlane_server.models.routes import ALIAS_PATTERN, CHAMPION, NAMED_VERSION, StickyBy

MOST_RULES = 64
MOST_ARMS = 16
"""Of one rule."""
MOST_CONDITION_VALUES = 1_000
MOST_STEPS = 16
MOST_CONCURRENT_COPIES = 1_000
LEAST_COPY_AGE_MS = 1_000
MOST_COPY_AGE_MS = 3_600_000
"""Far below the retention of ``evaluation.work``: every copy must end."""

_MISNAMED = "{!r} is no name: it must match " + ALIAS_PATTERN.pattern.replace("{", "{{").replace("}", "}}")
_PERCENT_SLACK = 1e-6


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
    if route.shadow is not None:
        yield from (f"shadow: {problem}" for problem in _problems_of_shadow(route.shadow, versions))
    if route.rollout is not None:
        yield from (f"rollout: {problem}" for problem in _problems_of_rollout(route.rollout, route, versions))


def _problems_of_aliases(route: ModelRoute, versions: Collection[str] | None) -> Iterator[str]:
    for alias, version in route.aliases.items():
        if not _is_arm_name(alias):
            yield f"aliases: {_MISNAMED.format(alias)}"
        if alias in RESERVED:
            yield f"aliases: {alias!r} is an arm of rollouts"
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
    if arm.arm in RESERVED:
        yield f"arm: {arm.arm!r} is an arm of rollouts"
    if not 0 <= arm.percent <= 100:
        yield f"percent: {arm.percent:g} is not from 0 to 100"
    if arm.target.startswith("@"):
        if arm.target[1:] not in route.aliases:
            yield f"target: unknown alias {arm.target!r}; known: {', '.join(sorted(route.aliases)) or 'none'}"
    else:
        yield from (f"target: {problem}" for problem in _unknown(arm.target, versions))


def _problems_of_rollout(rollout: Rollout, route: ModelRoute, versions: Collection[str] | None) -> Iterator[str]:
    if rollout.status not in tuple(RolloutStatus):
        yield f"status: {rollout.status!r} is none of {', '.join(RolloutStatus)}"
    if rollout.sticky_by not in tuple(StickyBy):
        yield f"sticky_by: {rollout.sticky_by!r} is none of {', '.join(StickyBy)}"
    yield from _problems_of_steps(rollout)
    if not is_active(rollout):
        return
    if rollout.champion != route.aliases.get(CHAMPION):
        yield f"champion: {rollout.champion!r} is not the champion; abort the rollout first"
    if rollout.candidate == rollout.champion:
        yield f"candidate: {rollout.candidate!r} is the champion"
    if rollout.candidate in route.stopped:
        yield f"candidate: {rollout.candidate!r} is stopped"
    yield from (f"candidate: {problem}" for problem in _unknown(rollout.candidate, versions))


def _problems_of_steps(rollout: Rollout) -> Iterator[str]:
    steps = rollout.steps
    if not 2 <= len(steps) <= MOST_STEPS:
        yield f"steps: {len(steps)} instead of 2 to {MOST_STEPS}"
    elif steps[-1] != 100:
        yield "steps: the last one is not 100, with which the candidate becomes the champion"
    elif not all(0 < one <= MOST_COMPARED_PERCENT for one in steps[:-1]):
        yield f"steps: all but the last must be above 0 and at most {MOST_COMPARED_PERCENT} percent"
    elif any(before >= after for before, after in pairwise(steps)):
        yield "steps: they do not rise"
    if not 0 <= rollout.step < max(1, len(steps) - 1):
        yield f"step: there is no step {rollout.step} before the last one"
    if rollout.least_step_ms < 0:
        yield f"least_step_ms: {rollout.least_step_ms} is less than 0"


def _problems_of_shadow(shadow: Shadow, versions: Collection[str] | None) -> Iterator[str]:
    if not 0 < shadow.percent <= 100:
        yield f"percent: {shadow.percent:g} is not above 0 and at most 100"
    if not 1 <= shadow.max_concurrent <= MOST_CONCURRENT_COPIES:
        yield f"max_concurrent: {shadow.max_concurrent} is not from 1 to {MOST_CONCURRENT_COPIES}"
    if not 0 < shadow.max_share <= 1:
        yield f"max_share: {shadow.max_share:g} is not above 0 and at most 1"
    if shadow.max_tokens_per_s is not None and not 0 < shadow.max_tokens_per_s < inf:
        yield f"max_tokens_per_s: {shadow.max_tokens_per_s:g} is not above 0"
    if not LEAST_COPY_AGE_MS <= shadow.max_age_ms <= MOST_COPY_AGE_MS:
        yield f"max_age_ms: {shadow.max_age_ms} is not from {LEAST_COPY_AGE_MS} to {MOST_COPY_AGE_MS}"
    if shadow.sticky_by not in tuple(StickyBy):
        yield f"sticky_by: {shadow.sticky_by!r} is none of {', '.join(StickyBy)}"
    if shadow.from_ms is not None and shadow.until_ms is not None and shadow.from_ms >= shadow.until_ms:
        yield "until_ms: not after from_ms"
    # A promotion or a rollback is not to wait for the end of a shadow: one of the champion, or of a stopped version,
    # copies nothing.
    if shadow.stopped_at_ms is None:
        yield from (f"candidate: {problem}" for problem in _unknown(shadow.candidate, versions))


def _is_arm_name(name: str) -> bool:
    return name != NAMED_VERSION and ALIAS_PATTERN.fullmatch(name) is not None


def _unknown(version: str, versions: Collection[str] | None) -> Iterator[str]:
    if versions is not None and version not in versions:
        yield f"unknown version {version!r}; known: {', '.join(sorted(versions)) or 'none'}"
