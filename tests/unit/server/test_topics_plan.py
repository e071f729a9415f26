from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.records import TenantSpec
from fairlane_server.topics.admin import ClusterState
from fairlane_server.topics.families import TopicFamily, TopicSpec, expand
from fairlane_server.topics.plan import (
    AddPartitions,
    ChangeConfig,
    CreateTopic,
    DeleteTopic,
    DeviationKind,
    ExistingTopic,
    Setting,
    TopicPlan,
    plan,
    unknown_override_tenants,
)

DAY_MS = 86_400_000
REQUESTS = TopicFamily(
    "requests",
    "requests.{tenant}",
    "Requests.",
    ("InferenceRequest",),
    "request_id",
    2,
    ("tenant",),
    ("dispatcher",),
    DAY_MS,
)
CONTROL = TopicFamily(
    "control",
    "control.tenants",
    "Tenants.",
    ("TenantSpec",),
    "tenant",
    1,
    ("operator",),
    ("dispatcher",),
    cleanup="compact",
)
FAMILIES = (REQUESTS, CONTROL)
WANTED = expand(FAMILIES, (TenantSpec("acme"),), ())
BROKER = {"offsets.retention.minutes": "2880"}
DEFAULTS = {"segment.ms": "604800000", "max.message.bytes": "1048588", "retention.ms": "604800000"}


def _existing(topic: TopicSpec, **changes: str) -> ExistingTopic:
    config = {**topic.config, "min.insync.replicas": "1"}
    return ExistingTopic(topic.name, topic.partitions, 1, {**DEFAULTS, **config, **changes}, frozenset(config))


def _cluster(*topics: ExistingTopic) -> dict[str, ExistingTopic]:
    return {topic.name: topic for topic in (*(_existing(topic) for topic in WANTED), *topics)}


def _plan(
    existing: dict[str, ExistingTopic], replication_factor: int = 1, *, delete: bool = False, shrink: bool = False
) -> TopicPlan:
    return plan(
        WANTED,
        existing,
        families=FAMILIES,
        broker_config=BROKER,
        replication_factor=replication_factor,
        delete=delete,
        shrink=shrink,
    )


def _problems(made: TopicPlan) -> list[tuple[str, DeviationKind]]:
    return [(finding.level, finding.problem) for finding in made.findings]


def test_cluster_as_it_should_be_needs_nothing() -> None:
    assert _plan(_cluster()) == TopicPlan((), ())


def test_missing_topics_are_created() -> None:
    made = _plan({})
    assert made.changes == (
        CreateTopic(
            "requests.acme",
            2,
            1,
            {
                "cleanup.policy": "delete",
                "message.timestamp.type": "CreateTime",
                "retention.ms": "86400000",
                "min.insync.replicas": "1",
            },
        ),
        CreateTopic(
            "control.tenants",
            1,
            1,
            {"cleanup.policy": "compact", "message.timestamp.type": "CreateTime", "min.insync.replicas": "1"},
        ),
    )
    assert made.findings == ()


@pytest.mark.parametrize(("replicas", "in_sync"), [(1, "1"), (2, "1"), (3, "2"), (5, "2")])
def test_acknowledged_records_survive_one_broker_where_there_are_three_copies(replicas: int, in_sync: str) -> None:
    created = [change for change in _plan({}, replication_factor=replicas).changes if isinstance(change, CreateTopic)]
    assert [(change.replication_factor, change.config["min.insync.replicas"]) for change in created] == [
        (replicas, in_sync)
    ] * 2


@pytest.mark.parametrize(
    ("brokers", "own", "copies"),
    [(1, None, 1), (2, None, 2), (3, None, 3), (5, None, 3), (1, "1", 1), (3, "1", 3), (2, "3", 3), (5, "4", 4)],
)
def test_a_new_topic_has_three_copies_where_it_can_and_no_fewer_than_the_cluster_wants(
    brokers: int, own: str | None, copies: int
) -> None:
    """Two brokers that want three copies: the third one is away just now."""
    config = None if own is None else {"default.replication.factor": own}
    assert ClusterState(brokers, {}, config).default_replication_factor == copies


def test_partitions_are_added_and_never_removed() -> None:
    topic = _existing(WANTED[0])
    assert _plan(_cluster(replace(topic, partitions=1))).changes == (AddPartitions("requests.acme", 1, 2),)
    made = _plan(_cluster(replace(topic, partitions=5)), delete=True, shrink=True)
    assert made.changes == ()
    assert _problems(made) == [("warning", DeviationKind.FEWER_PARTITIONS)]
    assert made.findings[0].message == "requests.acme: has 5 partitions, wanted 2; Kafka cannot remove any"


def test_settings_are_changed_in_one_go() -> None:
    topic = _existing(WANTED[0], **{"retention.ms": "1000", "message.timestamp.type": "LogAppendTime"})
    (change,) = _plan(_cluster(topic)).changes
    assert change == ChangeConfig(
        "requests.acme",
        (
            Setting("message.timestamp.type", "LogAppendTime", "CreateTime"),
            Setting("retention.ms", "1000", "86400000"),
        ),
    )
    assert change.detail == "message.timestamp.type LogAppendTime → CreateTime, retention.ms 1000 → 86400000"


def test_own_value_of_a_setting_that_is_no_longer_named_is_removed() -> None:
    topic = _existing(WANTED[0], **{"max.message.bytes": "9"})
    topic = replace(topic, overrides=topic.overrides | {"max.message.bytes", "compression.type"})
    assert _plan(_cluster(topic)).changes == (
        ChangeConfig("requests.acme", (Setting("max.message.bytes", "9", None),)),
    ), "and compression.type, which topics.yaml knows nothing about, is left alone"


@pytest.mark.parametrize(
    ("topic", "key", "before"),
    [
        (0, "retention.ms", str(2 * DAY_MS)),
        (0, "retention.ms", "-1"),
        (0, "cleanup.policy", "compact"),
        (1, "cleanup.policy", "delete"),
    ],
)
def test_what_deletes_records_waits_for_permission(topic: int, key: str, before: str) -> None:
    wanted = WANTED[topic]
    cluster = _cluster(_existing(wanted, **{key: before, "message.timestamp.type": "LogAppendTime"}))
    careful = _plan(cluster)
    assert [setting.key for change in careful.changes for setting in _settings(change)] == ["message.timestamp.type"]
    assert _problems(careful) == [("warning", DeviationKind.SHORTER_RETENTION)]
    assert "--shrink" in careful.findings[0].message

    bold = _plan(cluster, shrink=True)
    assert Setting(key, before, wanted.config[key]) in [item for change in bold.changes for item in _settings(change)]
    assert bold.findings == ()


def test_retention_stays_while_the_cleanup_policy_waits_for_permission() -> None:
    """Else a topic that becomes compacted would fall to the default retention first, and lose records."""
    topic = _existing(WANTED[1], **{"cleanup.policy": "delete", "retention.ms": str(30 * DAY_MS)})
    topic = replace(topic, overrides=topic.overrides | {"retention.ms"})
    assert _plan(_cluster(topic)).changes == ()
    assert len(_plan(_cluster(topic), shrink=True).changes) == 1


def _settings(change: object) -> tuple[Setting, ...]:
    return change.settings if isinstance(change, ChangeConfig) else ()


def test_extra_topic_of_a_family_is_reported_and_only_deleted_on_demand() -> None:
    extra = ExistingTopic("requests.globex", 1, 1, {})
    foreign = [ExistingTopic(name, 1, 1, {}) for name in ("orders", "requests.Globex", "__consumer_offsets")]
    made = _plan(_cluster(extra, *foreign))
    assert made.changes == ()
    assert [(finding.problem, finding.topic) for finding in made.findings] == [
        (DeviationKind.EXTRA_TOPIC, "requests.globex")
    ]
    assert _plan(_cluster(extra, *foreign), delete=True).changes == (DeleteTopic("requests.globex", "requests"),)


def test_fewer_replicas_are_reported() -> None:
    made = _plan(_cluster(), replication_factor=3)
    assert made.changes == ()
    assert _problems(made) == [("warning", DeviationKind.REPLICATION_FACTOR)] * 2


@pytest.mark.parametrize(("minutes", "level"), [("1441", None), ("1440", "error"), ("60", "error")])
def test_offsets_must_outlive_records(minutes: str, level: str | None) -> None:
    made = plan(
        WANTED,
        _cluster(),
        families=FAMILIES,
        broker_config={"offsets.retention.minutes": minutes},
        replication_factor=1,
    )
    assert _problems(made) == ([] if level is None else [(level, DeviationKind.OFFSETS_RETENTION)])
    assert bool(made.errors) == (level == "error")
    assert made.changes == ()
    if level is not None:
        assert made.findings[0].message.startswith(
            f"the broker's offsets.retention.minutes={minutes} is not longer than the retention of requests.acme: "
        )
        assert made.findings[0].message.endswith("set it above 1440")


@pytest.mark.parametrize("broker_config", [None, {}])
def test_hidden_broker_settings_are_a_warning(broker_config: dict[str, str] | None) -> None:
    made = plan(WANTED, _cluster(), families=FAMILIES, broker_config=broker_config, replication_factor=1)
    assert _problems(made) == [("warning", DeviationKind.OFFSETS_RETENTION)]
    compacted = plan(WANTED[1:], _cluster(), families=(CONTROL,), broker_config=broker_config, replication_factor=1)
    assert compacted.findings == ()


def test_override_of_an_unknown_tenant_is_reported() -> None:
    family = replace(REQUESTS, partitions_by_tenant={"acme": 2, "acmee": 3})
    (finding,) = unknown_override_tenants((family, CONTROL), ["acme"])
    assert finding.message == "requests: partitions_by_tenant names 'acmee', no tenant"


def _apply(made: TopicPlan, existing: dict[str, ExistingTopic]) -> dict[str, ExistingTopic]:
    """What a cluster does with a plan."""
    after = dict(existing)
    for change in made.changes:
        match change:
            case CreateTopic():
                config = {**DEFAULTS, **change.config}
                after[change.topic] = ExistingTopic(
                    change.topic, change.partitions, change.replication_factor, config, frozenset(change.config)
                )
            case AddPartitions():
                after[change.topic] = replace(after[change.topic], partitions=change.after)
            case ChangeConfig():
                topic = after[change.topic]
                config, overrides = dict(topic.config), set(topic.overrides)
                for setting in change.settings:
                    config[setting.key] = DEFAULTS[setting.key] if setting.after is None else setting.after
                    (overrides.discard if setting.after is None else overrides.add)(setting.key)
                after[change.topic] = replace(topic, config=config, overrides=frozenset(overrides))
            case DeleteTopic():
                del after[change.topic]
    return after


_RETENTION = st.sampled_from(["-1", "1000", "86400000", "172800000"])
_TOPIC = st.builds(
    lambda name, partitions, replicas, retention, cleanup, overrides: ExistingTopic(
        name,
        partitions,
        replicas,
        {
            **DEFAULTS,
            "retention.ms": retention,
            "cleanup.policy": cleanup,
            "message.timestamp.type": "CreateTime",
            "min.insync.replicas": "1",
        },
        frozenset(overrides),
    ),
    st.sampled_from(["requests.acme", "requests.globex", "control.tenants", "other"]),
    st.integers(1, 4),
    st.integers(1, 3),
    _RETENTION,
    st.sampled_from(["delete", "compact"]),
    st.sets(st.sampled_from(["retention.ms", "max.message.bytes", "segment.ms"])),
)


@given(st.lists(_TOPIC), st.booleans(), st.booleans(), st.sampled_from([1, 3]))
def test_plan_of_an_applied_plan_is_empty(
    topics: list[ExistingTopic], delete: bool, shrink: bool, replicas: int
) -> None:
    existing = {topic.name: topic for topic in topics}
    made = _plan(existing, replicas, delete=delete, shrink=shrink)
    after = _apply(made, existing)
    again = _plan(after, replicas, delete=delete, shrink=shrink)
    assert again.changes == ()
    assert again.findings == made.findings
    assert delete or existing.keys() <= after.keys()
    for name in existing.keys() & after.keys():
        assert after[name].partitions >= existing[name].partitions
        assert shrink or _keeps(existing[name], after[name])
        if name == "other":
            assert after[name] == existing[name]


def _keeps(before: ExistingTopic, after: ExistingTopic) -> bool:
    """Whether no record that was kept before is deleted now."""
    old, new = int(before.config["retention.ms"]), int(after.config["retention.ms"])
    return before.config["cleanup.policy"] == after.config["cleanup.policy"] and (new < 0 or 0 <= old <= new)
