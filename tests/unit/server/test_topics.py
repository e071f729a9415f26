from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane import names
from fairlane.outcomes import Priority
from fairlane.records import ModelVersion, TenantSpec
from fairlane_server.control.tenants_file import load_tenants
from fairlane_server.models.models_file import load_models
from fairlane_server.topics.families import TopicFamily, TopicSpec, expand, load_families, pools_of
from fairlane_server.yaml_config import ConfigError

REPOSITORY = Path(__file__).resolve().parents[3]
FAMILY = """\
families:
  requests:
    name: requests.{tenant}
    description: Requests.
    records: [InferenceRequest]
    key: request_id
    partitions: 1
    retention_ms: 604800000
    writers: [tenant]
    readers: [dispatcher]
"""


def _load(tmp_path: Path, text: str) -> tuple[TopicFamily, ...]:
    file = tmp_path / "topics.yaml"
    file.write_text(text)
    return load_families(file)


def _model(name: str, pool: str) -> ModelVersion:
    return ModelVersion(name, "1", pool, "simulated", ("generate",), name, 128, 16)


def test_family_is_read_with_every_field(tmp_path: Path) -> None:
    more = """\
    partitions_by_tenant: {acme: 3}
    cleanup: delete
    max_message_bytes: 1000
    timestamp_type: LogAppendTime
"""
    (family,) = _load(tmp_path, FAMILY + more)
    assert family == TopicFamily(
        family="requests",
        name="requests.{tenant}",
        description="Requests.",
        records=("InferenceRequest",),
        key="request_id",
        partitions=1,
        writers=("tenant",),
        readers=("dispatcher",),
        retention_ms=604_800_000,
        cleanup="delete",
        max_message_bytes=1000,
        timestamp_type="LogAppendTime",
        partitions_by_tenant={"acme": 3},
    )
    assert family.placeholders == ("tenant",)
    assert family.config == {
        "cleanup.policy": "delete",
        "retention.ms": "604800000",
        "max.message.bytes": "1000",
        "message.timestamp.type": "LogAppendTime",
    }


def test_short_lived_topic_closes_its_segments_in_time(tmp_path: Path) -> None:
    (family,) = _load(tmp_path, FAMILY.replace("604800000", "600000"))
    assert family.config["segment.ms"] == "600000"


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ("    key:", "    colour: red\n    key:", 6, "families.requests.colour: unknown key"),
        ("    key: request_id\n", "", 2, "families.requests: missing: key"),
        ("requests.{tenant}", "requests_{tenant}", 3, "'requests_{tenant}' is no part of a name"),
        ("requests.{tenant}", "Requests.{tenant}", 3, "'Requests' is no part of a name"),
        ("requests.{tenant}", "requests..{tenant}", 3, "'' is no part of a name"),
        ("requests.{tenant}", "requests-{tenant}", 3, "'requests-{tenant}' is no part of a name"),
        ("requests.{tenant}", "requests.{customer}", 3, "unknown placeholder {customer}; known: class, pool"),
        ("requests.{tenant}", "requests.{service}", 3, "placeholders must be one of these"),
        ("requests.{tenant}", "requests.{tenant}.{pool}", 3, "placeholders must be one of these"),
        ("requests.{tenant}", "requests.{tenant}.{tenant}", 3, "placeholders must be one of these"),
        (
            "[InferenceRequest]",
            "[InferenceRequests]",
            5,
            "unknown record 'InferenceRequests'; known: InferenceRequest,",
        ),
        ("request_id", "request-id", 6, "'request-id' does not match"),
        ("partitions: 1", "partitions: 0", 7, "must be from 1 to 10000, not 0"),
        ("partitions: 1", "partitions: 1\n    partitions_by_tenant: {Acme: 2}", 8, "'Acme' cannot name a tenant"),
        ("partitions: 1", "partitions: 1\n    partitions_by_tenant: {acme: 0}", 8, "must be from 1 to 10000"),
        ("partitions: 1", "partitions: 1\n    partitions_by_tenant: [acme]", 8, "must be a mapping of tenants"),
        ("604800000", "604800000\n    cleanup: compact", 8, "a compacted family keeps the last record"),
        ("604800000", "604800000\n    cleanup: shred", 9, "unknown value 'shred'; known: delete, compact"),
        ("604800000", "604800000\n    timestamp_type: Now", 9, "unknown value 'Now'; known: CreateTime"),
        ("    retention_ms: 604800000\n", "", 2, "missing: retention_ms (or cleanup: compact)"),
        ("[tenant]", "[tennant]", 9, "unknown role 'tennant'; known: tenant, gateway"),
        ("[dispatcher]", "[]", 10, "at least one role is needed"),
        ("  requests:\n", "  Requests:\n", 2, "'Requests' cannot name a family"),
        ("families:\n", "families:\ntopics:\n", 2, "topics: unknown key"),
    ],
)
def test_mistake_is_named_with_file_and_line(tmp_path: Path, old: str, new: str, line: int, message: str) -> None:
    assert old in FAMILY
    with pytest.raises(ConfigError) as caught:
        _load(tmp_path, FAMILY.replace(old, new, 1))
    assert str(caught.value).startswith(f"{tmp_path}/topics.yaml:{line}: ")
    assert message in caught.value.message


@pytest.mark.parametrize("text", ["families: {}", "families: []", "families:"])
def test_file_without_families_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"topics\.yaml:1: families: must be a mapping of at least one family"):
        _load(tmp_path, text)


def test_family_that_appears_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r":11: requests: duplicate key, first on line 2"):
        _load(tmp_path, FAMILY + FAMILY.removeprefix("families:\n"))


@pytest.mark.parametrize("name", ["requests.{tenant}", "requests.{pool}", "requests.all"])
def test_names_that_could_meet_are_refused(tmp_path: Path, name: str) -> None:
    other = FAMILY.removeprefix("families:\n").replace("  requests:", "  others:").replace("requests.{tenant}", name)
    with pytest.raises(ConfigError, match=r":12: families\.others\.name: .* could name a topic of family 'requests'"):
        _load(tmp_path, FAMILY + other)


def test_tenants_service_is_no_other_familys_tenant(tmp_path: Path) -> None:
    other = FAMILY.removeprefix("families:\n").replace("  requests:", "  others:")
    assert len(_load(tmp_path, FAMILY + other.replace("requests.{tenant}", "requests.{tenant}.{service}"))) == 2


def test_partitions_of_a_family_without_tenants_cannot_depend_on_them(tmp_path: Path) -> None:
    text = FAMILY.replace("requests.{tenant}", "requests.all") + "    partitions_by_tenant: {acme: 3}\n"
    with pytest.raises(ConfigError, match=r":11: .*'requests\.all' has no \{tenant\}"):
        _load(tmp_path, text)


def test_expansion_follows_the_placeholders() -> None:
    tenants = (TenantSpec("acme", services=("search", "mail")), TenantSpec("globex", pool="globex-gpu"))
    topics = expand(load_families(), tenants, (_model("a", "generate"), _model("b", "generate")))
    names_of: dict[str, list[str]] = {}
    for topic in topics:
        names_of.setdefault(topic.family, []).append(topic.name)
    assert names_of["requests"] == ["requests.acme", "requests.globex"]
    assert names_of["service-replies"] == ["replies.acme.search", "replies.acme.mail"]
    assert names_of["priority"] == [
        f"priority.{pool}.{name}" for pool in ("generate", "globex-gpu") for name in ("high", "normal", "low")
    ]
    assert names_of["control-tenants"] == ["control.tenants"]
    assert len({topic.name for topic in topics}) == len(topics)


def test_partitions_can_differ_by_tenant(tmp_path: Path) -> None:
    families = _load(tmp_path, FAMILY + "    partitions_by_tenant: {acme: 3}\n")
    assert [
        (topic.name, topic.partitions) for topic in expand(families, (TenantSpec("acme"), TenantSpec("globex")), ())
    ] == [("requests.acme", 3), ("requests.globex", 1)]


def test_pools_are_those_of_models_and_of_tenants() -> None:
    assert pools_of((TenantSpec("acme", pool="own"),), (_model("a", "b"), _model("c", "b"))) == ("b", "own")
    shared_and_own = replace(_model("a", "b"), dedicated_pools=("own", "later"))
    assert pools_of((TenantSpec("acme", pool="own"),), (shared_and_own,)) == ("b", "own", "later")


def test_installed_families_make_the_names_that_the_code_uses() -> None:
    """`fairlane.names` spells topics for the code, topics.yaml for the cluster: they must agree."""
    tenant, model = TenantSpec("acme", services=("search",)), _model("m", "generate")
    by_code = {
        names.requests_topic("acme"),
        names.backfill_topic("acme"),
        names.replies_topic("acme"),
        names.replies_topic("acme", "search"),
        *names.SHARED_REPLIES,
        names.chunks_topic("acme"),
        names.dead_letter_replies_topic("acme"),
        *(names.priority_topic("generate", name) for name in Priority),
        names.returned_topic("generate"),
        names.DEAD_LETTER_REQUESTS,
        names.DEAD_LETTER_WORK,
        names.CONTROL_TENANTS,
        names.CONTROL_MODELS,
        names.CONTROL_PRICES,
        names.CONTROL_CAPACITY,
        names.CONTROL_DISPATCH,
        names.CONTROL_CANCELLATIONS,
        names.LEDGER_USAGE,
        names.LEDGER_AUDIT,
        names.LEDGER_FEEDBACK,
        names.EVALUATION_WORK,
        names.EVALUATION_REPLIES,
    }
    assert {topic.name for topic in expand(load_families(), (tenant,), (model,))} == by_code


def test_what_deadlines_and_truth_rest_on() -> None:
    by_family = {family.family: family for family in load_families()}
    for family in ("requests", "backfill"):
        assert by_family[family].timestamp_type == "LogAppendTime", "a deadline starts at the broker's clock"
        assert by_family[family].partitions == 1
    for family in ("control-tenants", "control-models", "control-prices"):
        assert by_family[family].cleanup == "compact"
        assert by_family[family].partitions == 1
    assert all(not family.records for family in by_family.values() if family.key == "original")


def test_shipped_deployment_expands() -> None:
    topics = expand(
        load_families(REPOSITORY / "topics.yaml"),
        load_tenants(REPOSITORY / "deploy/tenants.yaml"),
        load_models(REPOSITORY / "deploy/models.yaml"),
    )
    assert (
        TopicSpec(
            "replies.acme.search",
            "service-replies",
            1,
            {
                "cleanup.policy": "delete",
                "retention.ms": "604800000",
                "max.message.bytes": "8388608",
                "message.timestamp.type": "CreateTime",
            },
            ("InferenceReply",),
        )
        in topics
    )


_NAME = st.from_regex(names.TENANT_PATTERN, fullmatch=True)


@given(_NAME, _NAME)
def test_topic_belongs_to_exactly_its_family(tenant: str, service: str) -> None:
    families = load_families()
    for topic in expand(families, (TenantSpec(tenant, services=(service,), pool=service),), ()):
        assert [family.family for family in families if family.matches(topic.name)] == [topic.family]
        assert len(topic.name) <= 249, "Kafka's limit"


@pytest.mark.parametrize(
    "topic", ["requests", "requests.", "requests.Acme", "requests.a.b", "xrequests.a", "requestsXa"]
)
def test_foreign_topics_belong_to_no_family(topic: str) -> None:
    assert not any(family.matches(topic) for family in load_families())
