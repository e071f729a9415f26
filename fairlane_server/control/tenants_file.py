"""Tenants of a deployment: ``deploy/tenants.yaml``, which is accepted as a whole or not at all, and single tenants as
JSON with the same keys."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from fairlane.guardrail_records import GuardrailPolicy, GuardrailRule, PostProcessing
from fairlane.money import nanos_text
from fairlane.names import MODEL_PATTERN, TENANT_PATTERN
from fairlane.outcomes import (
    BudgetPeriod,
    CacheMode,
    Degradation,
    EvaluationConsent,
    GuardrailAction,
    GuardrailFailure,
    Priority,
)
from fairlane.records import Budget, LatencyTarget, TenantGroup, TenantSpec
from fairlane_server.budgets.budgets import amounts_of, check_budget, check_budgets
from fairlane_server.costs.price_book import CURRENCY, LARGEST_PRICE
from fairlane_server.guardrail_policy import PolicyError, check_policy, default_failure, default_processing_failure
from fairlane_server.yaml_config import Reader, YamlNode, cycle_from, load_json, load_yaml_with_lines

# Of weights, which divide service, and of rates, which divide waiting times. Beyond these bounds sums would lose their
# small parts, and times would overflow their fields.
_LEAST_RATE, _LARGEST_RATE = 0.001, 1_000_000

_WARN, _DEGRADE = "warn", "degrade"
_PLACES = 9
"""Decimal places of an amount: those of a nano."""

_COUNTS = (
    *("max_queue_requests", "max_queue_bytes", "burst_requests", "tokens_per_minute", "tokens_per_day"),
    *("max_prompt_tokens", "max_completion_tokens"),
)

FILE, API = "file", "api"
"""What manages a tenant: this file, or the admin API."""

FORBIDDABLE = tuple(step for step in Degradation if step is not Degradation.NO_HISTORY)
"""Degradations that a tenant may forbid. A missing history is a failure and not a step that the dispatcher chooses."""


@dataclass(frozen=True, slots=True)
class KafkaQuotas:
    """Bounds of a tenant's clients at each broker, which delays what exceeds them.

    Attributes:
        request_percent: of the time of one of the broker's threads.
    """

    produce_bytes_per_s: int = 16 * 1024 * 1024
    fetch_bytes_per_s: int = 32 * 1024 * 1024
    request_percent: float = 50.0


def load_tenants(path: Path) -> tuple[TenantSpec, ...]:
    """Read the tenants in file order.

    Raises ConfigError with file, line and reason: unknown or missing keys, values out of bounds, unknown classes or
    degradations, duplicate tenants or groups, groups with a missing parent or a cycle of parents, a dedicated pool of
    two tenants, budgets that contradict each other, guardrails that cannot be carried out.
    """
    return tuple(_load(path))


def load_kafka_quotas(path: Path) -> Mapping[str, KafkaQuotas]:
    """The quotas of each tenant, from the same file. Raises as ``load_tenants``."""
    return {spec.tenant: quotas for spec, quotas in _load(path).items()}


def _load(path: Path) -> dict[TenantSpec, KafkaQuotas]:
    root = load_yaml_with_lines(path).mapping({"tenants"})["tenants"]
    tenants: dict[str, tuple[TenantSpec, KafkaQuotas]] = {}
    owners: dict[str, str] = {}
    for entry in root.sequence():
        spec, quotas = _tenant(entry)
        if spec.tenant in tenants:
            raise entry.fields["tenant"].error(f"{spec.tenant!r} is already defined")
        if spec.pool is not None and owners.setdefault(spec.pool, spec.tenant) != spec.tenant:
            raise entry.fields["pool"].error(f"{spec.pool!r} is already the dedicated pool of {owners[spec.pool]!r}")
        tenants[spec.tenant] = spec, quotas
    return dict(tenants.values())


def tenant_of_json(tenant: str, raw: bytes) -> TenantSpec:
    """A tenant from a JSON object with the keys of the file; the API manages it.

    Raises ConfigError as ``load_tenants``, with the key at fault; also for ``kafka``, which only the file sets.
    """
    entry = load_json(raw)
    known: dict[str, Reader] = {"tenant": _name, **_TENANT}
    node = entry.mapping(frozenset(), known.keys()).get("kafka")
    if node is not None:
        raise node.error("bounds of Kafka clients are set by `fairlane access`, from the tenants file alone")
    given = entry.read({}, known)
    if (named := given.pop("tenant", tenant)) != tenant:
        raise entry.fields["tenant"].error(f"is {named!r}, and the path names {tenant!r}")
    return replace(_spec(tenant, given), managed_by=API)


def tenant_document(spec: TenantSpec) -> dict[str, Any]:
    """The settings of a tenant with the keys of the file, which ``tenant_of_json`` reads back; None is left out."""
    document = _plain(spec)
    for name in ("tenant", "managed_by"):
        document.pop(name)
    queue = {key: document.pop(name) for key, name in _QUEUE.items()}
    quotas = {name: document.pop(name) for name in _QUOTAS if name in document}
    targets = document.pop("latency_targets")
    post_processing = document.get("guardrails", {}).get("post_processing", {})
    if "json_schema" in post_processing:
        post_processing["json_schema"] = json.loads(post_processing["json_schema"])
    return document | {
        "budgets": [_budget_document(budget) for budget in spec.budgets],
        "queue": queue,
        "quotas": quotas,
        "forbid": document.pop("forbidden_degradations"),
        "latency_target_ms": {target["priority_class"]: target["target_ms"] for target in targets},
    }


def _budget_document(budget: Budget) -> dict[str, Any]:
    amounts = {name: nanos_text(nanos) for name, nanos in amounts_of(budget)}
    reaction = {} if budget.soft_nanos is None else {"at_soft": _DEGRADE if budget.degrade else _WARN}
    return {"of": budget.of, "period": budget.period, "currency": budget.currency} | amounts | reaction


def _plain(record: Any) -> dict[str, Any]:
    """A record as JSON values, without those that are None."""

    def without_none(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        return {name: list(value) if isinstance(value, tuple) else value for name, value in pairs if value is not None}

    return asdict(record, dict_factory=without_none)


def check_values(spec: TenantSpec) -> None:
    """Check a specification that was not read from a file against the file's bounds and rules. Raises ValueError."""
    rates = {"weight": spec.weight, "requests_per_s": spec.requests_per_s}
    rates |= {f"weight of group {group.group}": group.weight for group in spec.groups}
    for name, rate in rates.items():
        if rate is not None and not _LEAST_RATE <= rate <= _LARGEST_RATE:
            raise ValueError(f"{name}: must be from {_LEAST_RATE} to {_LARGEST_RATE}, not {rate}")
    for name in _COUNTS:
        count = getattr(spec, name)
        if count is not None and count < 1:
            raise ValueError(f"{name}: must be at least 1, not {count}")
    for target in spec.latency_targets:
        if target.target_ms < 1:
            raise ValueError(f"latency target of {target.priority_class}: must be at least 1, not {target.target_ms}")
    check_budgets(spec)
    if spec.guardrails is not None:
        check_policy(spec.guardrails)


def _groups(node: YamlNode) -> tuple[TenantGroup, ...]:
    nodes: dict[str, YamlNode] = {}
    groups: dict[str, TenantGroup] = {}
    for entry in node.sequence():
        group = TenantGroup(**entry.read({"group": _name}, _GROUP))
        if (known := nodes.get(group.group)) is not None:
            line = known.fields["group"].line
            raise entry.fields["group"].error(f"{group.group!r} is already defined on line {line}")
        nodes[group.group], groups[group.group] = entry, group
    # In the file a parent may come after its children.
    for name, group in groups.items():
        if group.parent is not None and group.parent not in groups:
            message = f"unknown group {group.parent!r}; known here: {', '.join(groups)}"
            raise nodes[name].fields["parent"].error(message)
    parents = {name: group.parent for name, group in groups.items()}
    for name in groups:
        if circle := cycle_from(name, parents):
            raise nodes[name].fields["parent"].error(f"the parents go round in a circle: {' -> '.join(circle)}")
    return tuple(groups.values())


def _latency_targets(node: YamlNode) -> tuple[LatencyTarget, ...]:
    given = node.read({}, dict.fromkeys(map(str, Priority), _whole))
    return tuple(LatencyTarget(name, target_ms) for name, target_ms in given.items())


def _budgets(node: YamlNode) -> tuple[Budget, ...]:
    budgets = []
    for entry in node.sequence():
        given = entry.read({"period": _period, "currency": _currency}, _BUDGET)
        names = {"soft": "soft_nanos", "hard": "hard_nanos"}
        fields = {names.get(key, key): value for key, value in given.items() if key != "at_soft"}
        budget = Budget(**{"of": "tenant", **fields}, degrade=given.get("at_soft", _WARN) == _DEGRADE)
        try:
            check_budget(budget)
        except ValueError as error:
            raise entry.error(str(error)) from None
        budgets.append(budget)
    try:
        check_budgets(TenantSpec("", budgets=tuple(budgets)))
    except ValueError as error:
        raise node.error(str(error)) from None
    return tuple(budgets)


def _guardrails(node: YamlNode) -> GuardrailPolicy:
    policy = GuardrailPolicy(**node.read({}, _GUARDRAILS))
    try:
        check_policy(policy)
    except PolicyError as error:
        raise _at(node, error.place).error(error.reason) from None
    return policy


def _action(node: YamlNode) -> str:
    # YAML takes an unquoted off for a boolean.
    off = node.value is False and node.text == GuardrailAction.OFF
    return GuardrailAction.OFF if off else node.choice("action", tuple(GuardrailAction))


def _rule(node: YamlNode) -> GuardrailRule:
    given = node.read({"check": YamlNode.string, "action": _action}, {"on_failure": _failure})
    return GuardrailRule(given["check"], given["action"], given.get("on_failure", default_failure(given["action"])))


def _post_processing(node: YamlNode) -> PostProcessing:
    given = node.read({}, _POST_PROCESSING)
    return PostProcessing(**{"on_failure": default_processing_failure(given.get("json_schema")), **given})


def _json_schema(node: YamlNode) -> str:
    node.mapping(frozenset(), node.fields.keys())
    try:
        return json.dumps(node.value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError):
        raise node.error("has a value that JSON does not have, such as a date; quote it") from None


def _at(node: YamlNode, place: tuple[str | int, ...]) -> YamlNode:
    """The node at this path, or the last one of it that the file has."""
    for part in place:
        if isinstance(part, int):
            node = node.items[part]
        elif part in node.fields:
            node = node.fields[part]
    return node


_rate = partial(YamlNode.number, minimum=_LEAST_RATE, maximum=_LARGEST_RATE)
_name = partial(YamlNode.string, pattern=TENANT_PATTERN)
_whole = partial(YamlNode.integer, minimum=1)
_GROUP: dict[str, Reader] = {"weight": _rate, "parent": _name}
_QUEUE = {"max_requests": "max_queue_requests", "max_bytes": "max_queue_bytes"}
"""Keys, and the fields of a specification that they set."""
_QUOTAS: dict[str, Reader] = {
    "requests_per_s": _rate,
    "burst_requests": _whole,
    "tokens_per_minute": _whole,
    "tokens_per_day": _whole,
}
_KAFKA: dict[str, Reader] = {
    "produce_bytes_per_s": _whole,
    "fetch_bytes_per_s": _whole,
    "request_percent": _rate,
}
_period = partial(YamlNode.choice, kind="period", known=tuple(BudgetPeriod))
_currency = partial(YamlNode.string, pattern=CURRENCY)
_amount = partial(YamlNode.decimal, places=_PLACES, maximum=LARGEST_PRICE)
_BUDGET: dict[str, Reader] = {
    "of": YamlNode.string,
    "soft": _amount,
    "hard": _amount,
    "at_soft": partial(YamlNode.choice, kind="reaction", known=(_WARN, _DEGRADE)),
}
_failure = partial(YamlNode.choice, kind="on_failure", known=tuple(GuardrailFailure))
_GUARDRAILS: dict[str, Reader] = {
    "input": lambda node: tuple(map(_rule, node.sequence())),
    "output": lambda node: tuple(map(_rule, node.sequence())),
    "patterns": YamlNode.strings,
    "denied_words": YamlNode.strings,
    "post_processing": _post_processing,
}
_POST_PROCESSING: dict[str, Reader] = {
    "deduplicate": YamlNode.boolean,
    "trim": YamlNode.boolean,
    "json_schema": _json_schema,
    "on_failure": _failure,
}
_TENANT: dict[str, Reader] = {
    "weight": _rate,
    "classes": partial(YamlNode.choices, kind="class", known=tuple(Priority), least=1),
    "models": partial(YamlNode.strings, pattern=MODEL_PATTERN),
    "services": partial(YamlNode.strings, pattern=TENANT_PATTERN),
    "pool": _name,
    "latency_target_ms": _latency_targets,
    "queue": lambda node: node.read({}, dict.fromkeys(_QUEUE, _whole)),
    "quotas": lambda node: node.read({}, _QUOTAS),
    "kafka": lambda node: KafkaQuotas(**node.read({}, _KAFKA)),
    "groups": _groups,
    "forbid": partial(YamlNode.choices, kind="degradation", known=FORBIDDABLE),
    "max_prompt_tokens": _whole,
    "max_completion_tokens": _whole,
    "cache": partial(YamlNode.choice, kind="cache", known=tuple(CacheMode)),
    "evaluation": partial(YamlNode.choice, kind="evaluation", known=tuple(EvaluationConsent)),
    "budgets": _budgets,
    "guardrails": _guardrails,
}


def _tenant(entry: YamlNode) -> tuple[TenantSpec, KafkaQuotas]:
    given = entry.read({"tenant": _name}, _TENANT)
    kafka = given.pop("kafka", KafkaQuotas())
    return _spec(given.pop("tenant"), given), kafka


def _spec(tenant: str, given: dict[str, Any]) -> TenantSpec:
    """``given``: what the readers of the keys made, without tenant and Kafka's quotas."""
    queue = {_QUEUE[key]: bound for key, bound in given.pop("queue", {}).items()}
    return TenantSpec(
        tenant,
        **given.pop("quotas", {}),
        **queue,
        forbidden_degradations=given.pop("forbid", ()),
        latency_targets=given.pop("latency_target_ms", ()),
        **given,
    )
