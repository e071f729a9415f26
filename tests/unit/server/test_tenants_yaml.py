import re
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from fairlane.records import TenantGroup, TenantSpec
from fairlane_server.control.tenants_file import KafkaQuotas, load_kafka_quotas, load_tenants
from fairlane_server.yaml_config import ConfigError

REPOSITORY = Path(__file__).resolve().parents[3]


def _load(tmp_path: Path, text: str) -> tuple[TenantSpec, ...]:
    file = tmp_path / "tenants.yaml"
    file.write_text(text)
    return load_tenants(file)


def test_tenant_is_read_with_every_field(tmp_path: Path) -> None:
    text = """\
tenants:
  - tenant: acme
    weight: 2
    classes: [high, low]
    models: [a-model, b.model_2]
    services: [search, mail]
    pool: acme-gpu
    queue: {max_requests: 10, max_bytes: 2000}
    quotas: {requests_per_s: 0.5, burst_requests: 3, tokens_per_minute: 100, tokens_per_day: 1000}
    groups:
      - {group: images, parent: search}
      - {group: search, weight: 3}
    forbid: [smaller_model, no_retrieval]
    max_prompt_tokens: 900
    max_completion_tokens: 80
    cache: semantic
  - tenant: globex
"""
    assert _load(tmp_path, text) == (
        TenantSpec(
            "acme",
            weight=2.0,
            classes=("high", "low"),
            models=("a-model", "b.model_2"),
            services=("search", "mail"),
            pool="acme-gpu",
            max_queue_requests=10,
            max_queue_bytes=2000,
            requests_per_s=0.5,
            burst_requests=3,
            tokens_per_minute=100,
            tokens_per_day=1000,
            groups=(TenantGroup("images", parent="search"), TenantGroup("search", weight=3.0)),
            forbidden_degradations=("smaller_model", "no_retrieval"),
            max_prompt_tokens=900,
            max_completion_tokens=80,
            cache="semantic",
        ),
        TenantSpec("globex"),
    )


def test_kafka_quotas_are_read_beside_the_tenants(tmp_path: Path) -> None:
    (tmp_path / "tenants.yaml").write_text(
        "tenants:\n  - {tenant: acme, kafka: {fetch_bytes_per_s: 5}}\n  - tenant: b\n"
    )
    assert load_kafka_quotas(tmp_path / "tenants.yaml") == {
        "acme": KafkaQuotas(fetch_bytes_per_s=5),
        "b": KafkaQuotas(),
    }


@pytest.mark.parametrize(
    ("entry", "line", "message"),
    [
        ("weight: 1", 2, "missing: tenant"),
        ("tenant: Acme", 2, "'Acme' does not match"),
        ("tenant: acme.search", 2, "'acme.search' does not match"),
        (f"tenant: {'a' * 40}", 2, "does not match"),
        ("tenant: 7", 2, "must be a string, not 7 (quote it)"),
        ("tenant: acme\n    colour: red", 3, "colour: unknown key; known here: budgets, cache, classes"),
        ("tenant: acme\n    weight: 0", 3, "weight: must be from 0.001 to 1000000, not 0"),
        ("tenant: acme\n    weight: .inf", 3, "weight: must be from 0.001 to 1000000"),
        ("tenant: acme\n    weight: .nan", 3, "weight: must be from 0.001 to 1000000"),
        ("tenant: acme\n    weight: heavy", 3, "weight: must be a number, not 'heavy'"),
        ("tenant: acme\n    classes: [urgent]", 3, "unknown class 'urgent'; known: high, normal, low"),
        ("tenant: acme\n    classes: []", 3, "at least one class is needed"),
        ("tenant: acme\n    classes: [low, low]", 3, "'low' appears twice"),
        ("tenant: acme\n    services: [Search]", 3, "'Search' does not match"),
        ("tenant: acme\n    pool: own.gpu", 3, "'own.gpu' does not match"),
        ("tenant: acme\n    queue: {max_items: 5}", 3, "queue.max_items: unknown key"),
        ("tenant: acme\n    queue:\n      max_bytes: 0", 4, "queue.max_bytes: must be at least 1, not 0"),
        ("tenant: acme\n    quotas: {tokens_per_day: 1.5}", 3, "tokens_per_day: must be a whole number, not 1.5"),
        ("tenant: acme\n    quotas: {requests_per_s: -1}", 3, "requests_per_s: must be from 0.001 to 1000000"),
        (
            "tenant: acme\n    quotas: {requests_per_s: 1.0e-4}",
            *(3, "requests_per_s: must be from 0.001 to 1000000, not 0.0001"),
        ),
        ("tenant: acme\n    quotas: {requests_per_s: 1.0e-322}", 3, "requests_per_s: must be from 0.001"),
        ("tenant: acme\n    quotas: {requests_per_s: 1000001}", 3, "requests_per_s: must be from 0.001 to 1000000"),
        ("tenant: acme\n    weight: -1", 3, "weight: must be from 0.001 to 1000000, not -1"),
        ("tenant: acme\n    weight: 1.0e-9", 3, "weight: must be from 0.001 to 1000000, not 1e-09"),
        (f"tenant: acme\n    weight: 1{'0' * 400}", 3, "weight: must be from 0.001 to 1000000"),
        (f"tenant: acme\n    quotas: {{tokens_per_day: {2**63}}}", 3, "tokens_per_day: must be at most"),
        ("tenant: acme\n    groups: search", 3, "groups: must be a list"),
        ("tenant: acme\n    groups: [search]", 3, "groups[0]: must be a mapping"),
        ("tenant: acme\n    groups:\n      - weight: 2", 4, "groups[0]: missing: group"),
        ("tenant: acme\n    groups:\n      - group: Search", 4, "'Search' does not match"),
        ("tenant: acme\n    groups:\n      - group: a\n        share: 2", 5, "groups[0].share: unknown key"),
        ("tenant: acme\n    groups:\n      - group: a\n        weight: 0", 5, "groups[0].weight: must be from"),
        ("tenant: acme\n    groups:\n      - group: a\n        weight: -2", 5, "groups[0].weight: must be from"),
        ("tenant: acme\n    groups:\n      - group: a\n      - group: a", 5, "'a' is already defined on line 4"),
        (
            "tenant: acme\n    groups:\n      - {group: a}\n      - group: b\n        parent: c",
            *(6, "groups[1].parent: unknown group 'c'; known here: a, b"),
        ),
        ("tenant: acme\n    groups:\n      - {group: a, parent: a}", 4, "go round in a circle: a -> a"),
        (
            "tenant: acme\n    groups: [{group: c, parent: a},\n      {group: a, parent: b}, {group: b, parent: a}]",
            *(4, "groups[1].parent: the parents go round in a circle: a -> b -> a"),
        ),
        ("tenant: acme\n    cache: always", 3, "unknown cache 'always'; known: none, exact, semantic"),
        ("tenant: acme\n    cache: true", 3, "must be a string, not True"),
        ("tenant: acme\n    forbid: [slower_model]", 3, "unknown degradation 'slower_model'; known: fewer_passages,"),
        ("tenant: acme\n    forbid: smaller_model", 3, "forbid: must be a list"),
        ("tenant: acme\n    max_prompt_tokens: 0", 3, "max_prompt_tokens: must be at least 1, not 0"),
        ("tenant: acme\n    max_prompt_tokens: -5", 3, "max_prompt_tokens: must be at least 1, not -5"),
        ("tenant: acme\n    max_prompt_tokens: many", 3, "max_prompt_tokens: must be a whole number, not 'many'"),
        ("tenant: acme\n    max_completion_tokens: 0", 3, "max_completion_tokens: must be at least 1, not 0"),
        ("tenant: acme\n    max_completion_tokens: 1.5", 3, "max_completion_tokens: must be a whole number, not 1.5"),
        (
            "tenant: acme\n    pool: own\n  - tenant: globex\n    pool: own",
            *(5, "tenants[1].pool: 'own' is already the dedicated pool of 'acme'"),
        ),
        ("tenant: acme\n  - tenant: acme", 3, "'acme' is already defined"),
        ("tenant: acme\n    tenant: globex", 3, "duplicate key, first on line 2"),
    ],
)
def test_mistake_is_named_with_file_and_line(tmp_path: Path, entry: str, line: int, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _load(tmp_path, f"tenants:\n  - {entry}\n")
    assert str(caught.value).startswith(f"{tmp_path}/tenants.yaml:{line}: ")
    assert message in caught.value.message


# What normalises, folds or looks like a valid name, beside any text at all.
_letters = st.sampled_from([*"ab2-", "\u0430", "\uff41", "\u00e4", "\u017f", "\u00b2", "\u0661", "\u200b", *"A_.*/ \n"])


@given(st.text(_letters, min_size=1, max_size=41) | st.text(min_size=1, max_size=5))
@pytest.mark.parametrize("field", ["tenant", "services[0]", "pool"])
def test_a_name_is_of_few_letters_or_refused_by_its_field(field: str, name: str) -> None:
    entry: dict[str, object] = {"tenant": "acme", "services": [], "pool": "own"}
    entry |= {"services": [name]} if field == "services[0]" else {field: name}
    with TemporaryDirectory() as folder:
        file = Path(folder) / "tenants.yaml"
        file.write_text(yaml.safe_dump({"tenants": [entry]}), encoding="utf-8")
        if re.fullmatch("[a-z0-9][a-z0-9-]{0,38}", name, re.ASCII):
            assert len(load_tenants(file)) == 1
        else:
            with pytest.raises(ConfigError) as caught:
                load_tenants(file)
            assert caught.value.message.startswith(f"tenants[0].{field}: ")


@pytest.mark.parametrize("text", ["", "tenants: acme", "tenant: acme", "- tenant: acme", "tenants: [acme]", "{", "\t"])
def test_file_of_another_shape_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"tenants\.yaml(:\d+)?: "):
        _load(tmp_path, text)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read"):
        load_tenants(tmp_path / "none.yaml")


def test_shipped_tenants_are_read() -> None:
    assert [tenant.tenant for tenant in load_tenants(REPOSITORY / "deploy/tenants.yaml")] == [
        "acme",
        "globex",
        "initech",
    ]
