"""The plan of a shadow, from the body of a call."""

from collections.abc import Mapping
from functools import partial

from fairlane_server.evaluation.shadows import ShadowPlan
from fairlane_server.models.route_checks import LEAST_COPY_AGE_MS, MOST_CONCURRENT_COPIES, MOST_COPY_AGE_MS
from fairlane_server.models.routes import ALIAS_PATTERN, VERSION_PATTERN, StickyBy
from fairlane_server.yaml_config import Reader, YamlNode, load_json


def shadow_plan_of_json(raw: bytes) -> ShadowPlan:
    """The plan of a call's body, which names the candidate; what it leaves out has its default. Raises ConfigError with
    the key and the reason."""
    given = load_json(raw).read({"candidate": partial(YamlNode.string, pattern=VERSION_PATTERN)}, _PLAN)
    return ShadowPlan(**{_FIELDS.get(name, name): value for name, value in given.items()})


def _age_ms(node: YamlNode) -> int:
    return round(1_000 * node.number(minimum=LEAST_COPY_AGE_MS / 1_000, maximum=MOST_COPY_AGE_MS / 1_000))


_FIELDS = {"from": "from_ms", "until": "until_ms", "max_age_s": "max_age_ms"}
_PLAN: Mapping[str, Reader] = {
    "percent": partial(YamlNode.number, minimum=0, maximum=100),
    "max_concurrent": partial(YamlNode.integer, minimum=1, maximum=MOST_CONCURRENT_COPIES),
    "max_share": partial(YamlNode.number, minimum=0, maximum=1),
    "max_tokens_per_s": partial(YamlNode.number, minimum=0, maximum=1e12),
    "max_age_s": _age_ms,
    "sticky_by": partial(YamlNode.choice, kind="sticky key", known=tuple(StickyBy)),
    "arm": partial(YamlNode.string, pattern=ALIAS_PATTERN),
    "from": YamlNode.utc_ms,
    "until": YamlNode.utc_ms,
}
