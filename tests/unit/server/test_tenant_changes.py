"""Tenants as JSON, and what is decided about changes of them."""

import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from fairlane.guardrail_records import GuardrailPolicy, GuardrailRule, PostProcessing
from fairlane.records import Budget, LatencyTarget, TenantGroup, TenantSpec
from fairlane.schema_files import default_codec
from fairlane.settings import Settings
from fairlane_server.administration import tenants
from fairlane_server.administration.events import AdminEvent
from fairlane_server.administration.tenant_remains import TenantRemains, topics_of_name, written_topics
from fairlane_server.administration.tenants import (
    ETagNeededError,
    TenantChangedError,
    TenantConflictError,
    TenantNotFoundError,
    Tenants,
    decide_removal,
    decide_set,
    etag_of,
)
from fairlane_server.api_keys.key_store import BARRED_TENANTS, Author
from fairlane_server.control.published_tenants import managed_by_api, with_api_tenants
from fairlane_server.control.publisher import compare
from fairlane_server.control.tenants_file import API, load_tenants, tenant_document, tenant_of_json
from fairlane_server.kafka.cluster_admin import ClusterError
from fairlane_server.topics.families import load_families
from fairlane_server.yaml_config import ConfigError, load_json
from tests.kit.topic_prefix import topic_prefix

REPOSITORY = Path(__file__).parents[3]
FULL = TenantSpec(
    "acme",
    weight=2.5,
    classes=("high",),
    models=("m",),
    services=("search",),
    pool="own",
    max_queue_requests=7,
    max_queue_bytes=8,
    requests_per_s=1.5,
    burst_requests=3,
    tokens_per_minute=4,
    tokens_per_day=5,
    groups=(TenantGroup("a", 2.0), TenantGroup("b", 1.0, "a")),
    forbidden_degradations=("no_retrieval",),
    max_prompt_tokens=9,
    max_completion_tokens=10,
    cache="exact",
    latency_targets=(LatencyTarget("high", 200),),
    budgets=(Budget("tenant", "month", "EUR", 5_000_000, 7_250_000_000, True), Budget("key:a", "day", "EUR", None, 1)),
    guardrails=GuardrailPolicy(
        input=(GuardrailRule("secrets", "block", "closed"),),
        post_processing=PostProcessing(trim=True, json_schema='{"type":"object","const":{"a":[1,2.5,null]}}'),
    ),
    managed_by=API,
    evaluation="allowed",
)
OF_FILE = TenantSpec("globex")


def read_back(spec: TenantSpec) -> TenantSpec:
    return tenant_of_json(spec.tenant, json.dumps(tenant_document(spec)).encode())


def test_a_tenant_as_json_has_the_keys_of_the_file_and_is_read_back() -> None:
    assert all(getattr(FULL, name) != getattr(TenantSpec("x"), name) for name in TenantSpec.__slots__)
    assert read_back(FULL) == FULL
    for spec in load_tenants(REPOSITORY / "deploy" / "tenants.yaml"):
        assert read_back(spec) == replace(spec, managed_by=API)
    assert read_back(TenantSpec("acme")) == TenantSpec("acme", managed_by=API)


@pytest.mark.parametrize(
    ("body", "key"),
    [
        ('{"wieght": 2}', "wieght"),
        ('{"weight": "2"}', "weight"),
        ('{"weight": 2, "weight": 3}', "weight"),
        ('{"quotas": {"tokens_per_day": 0}}', "quotas.tokens_per_day"),
        ('{"groups": [{"group": "a", "parent": "b"}]}', "groups[0].parent"),
        ('{"kafka": {"request_percent": 500}}', "kafka"),
        ('{"tenant": "globex"}', "tenant"),
        (
            '{"guardrails": {"post_processing": {"json_schema": {"type": "text"}}}}',
            "guardrails.post_processing.json_schema",
        ),
        ("[]", ""),
        ("not json", ""),
        ('{"weight": NaN}', ""),
        ("[" * 100_000, ""),
    ],
)
def test_what_is_wrong_is_named(body: str, key: str) -> None:
    with pytest.raises(ConfigError) as wrong:
        tenant_of_json("acme", body.encode())
    assert wrong.value.key == key


def test_numbers_keep_the_text_that_they_were_written_as() -> None:
    node = load_json(b'{"amount": 0.1000000000000000055, "count": 12, "text": "3.50"}')
    assert [node.fields[name].text for name in ("amount", "count", "text")] == ["0.1000000000000000055", "12", "3.50"]


def test_a_new_tenant_needs_no_etag_and_an_existing_one_does() -> None:
    change = decide_set({}, FULL, None, adopt=False)
    assert (change.before, change.after) == (None, FULL)
    published = {"acme": FULL}
    with pytest.raises(ETagNeededError):
        decide_set(published, FULL, None, adopt=False)
    with pytest.raises(TenantChangedError):
        decide_set(published, FULL, etag_of(replace(FULL, weight=1.0)), adopt=False)
    assert decide_set(published, replace(FULL, weight=3.0), etag_of(FULL), adopt=False).before == FULL
    with pytest.raises(TenantNotFoundError):
        decide_set({}, FULL, etag_of(FULL), adopt=False)
    # Unreadable by this version: it can be replaced by whoever has seen that.
    assert decide_set({"acme": None}, FULL, etag_of(None), adopt=False).before is None


def test_a_tenant_of_the_file_is_changed_once_it_is_adopted() -> None:
    published = {"globex": OF_FILE}
    wanted = replace(OF_FILE, weight=2.0, managed_by=API)
    with pytest.raises(TenantConflictError, match="tenants file"):
        decide_set(published, wanted, etag_of(OF_FILE), adopt=False)
    assert decide_set(published, wanted, etag_of(OF_FILE), adopt=True).after == wanted
    with pytest.raises(TenantConflictError):
        decide_removal(published, "globex", etag_of(OF_FILE))
    with pytest.raises(TenantNotFoundError):
        decide_removal(published, "initech", None)
    assert decide_removal({"acme": FULL}, "acme", etag_of(FULL)).after is None


def test_a_name_under_which_something_is_left_is_given_to_the_same_customer_alone() -> None:
    left = TenantRemains((BARRED_TENANTS, "results", "usage"), ("replies.acme", "requests.acme"))
    with pytest.raises(TenantConflictError) as refused:
        decide_set({}, FULL, None, adopt=False, remains=left)
    for part in (
        "it is barred, rows in results, usage, topics replies.acme, requests.acme",
        *("`restore=true`", "`fairlane access apply --delete`", "`fairlane topics apply --delete`"),
    ):
        assert part in str(refused.value)
    assert decide_set({}, FULL, None, adopt=False, restore=True, remains=left).before is None
    for one in (TenantRemains(("users",)), TenantRemains(topics=("requests.acme",))):
        with pytest.raises(TenantConflictError):
            decide_set({}, FULL, None, adopt=False, remains=one)
    # Nothing is left, which may be said to be restored.
    assert decide_set({}, FULL, None, adopt=False, restore=True).after == FULL
    # Of a tenant that is published all of this is its own.
    assert decide_set({"acme": FULL}, FULL, etag_of(FULL), adopt=False, remains=left).before == FULL
    many = TenantRemains(tuple(f"t{number}" for number in range(5)))
    assert str(many) == "rows in t0, t1, t2 and 2 more"


def test_the_topics_of_a_name_are_those_of_no_longer_name() -> None:
    own = {"requests.acme", "backfill.acme", "replies.acme", "replies.acme.search", "chunks.acme"}
    own |= {"dead-letter.replies.acme"}
    others = {"requests.acme2", "replies.acme-2", "replies.a", "replies.a.cme", "replies.search.acme", "other.acme"}
    others |= {"dead-letter.requests", "priority.acme.high", "ledger.usage"}
    assert set(topics_of_name(load_families(), "acme", own | others)) == own
    with topic_prefix("staging."):
        topics = {f"staging.{topic}" for topic in own} | own
        assert set(topics_of_name(load_families(), "acme", topics)) == {f"staging.{topic}" for topic in own}


class Cluster:
    """With the ends of its topics' partitions."""

    def __init__(self, ends: Mapping[str, Sequence[int | Exception]]) -> None:
        self.admin = self
        self._ends = ends

    def metadata(self) -> Any:
        return SimpleNamespace(
            topics={topic: SimpleNamespace(partitions=dict(enumerate(ends))) for topic, ends in self._ends.items()}
        )

    def list_offsets(self, places: Mapping[TopicPartition, Any], **_: Any) -> Mapping[TopicPartition, Any]:
        def answer(place: TopicPartition) -> Any:
            end = self._ends[place.topic][place.partition]
            future: Future[Any] = Future()
            if isinstance(end, Exception):
                future.set_exception(end)
            else:
                future.set_result(SimpleNamespace(offset=end))
            return future

        return {place: answer(place) for place in places}


def test_topics_that_nobody_has_written_to_are_as_good_as_new_ones() -> None:
    ends = {"requests.acme": (0, 0), "replies.acme": (0, 7), "chunks.acme": (0,), "requests.globex": (9,)}
    cluster: Any = Cluster(ends)
    assert written_topics(cluster, load_families(), "acme") == ["replies.acme"]
    assert written_topics(cluster, load_families(), "initech") == []
    unreadable: Any = Cluster({"requests.acme": (KafkaException(KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)),)})
    with pytest.raises(ClusterError, match=r"requests\.acme: its end cannot be read"):
        written_topics(unreadable, load_families(), "acme")


class Deployment:
    """What `Tenants` uses, and in which order."""

    def __init__(self, published: dict[str, TenantSpec | None]) -> None:
        self.published = published
        self.done: list[str] = []
        self.left: Sequence[str] = ()

    def read(self) -> dict[str, TenantSpec | None]:
        return dict(self.published)

    def publish(self, records: Sequence[TenantSpec], withdrawn: Sequence[str] = ()) -> None:
        self.done += [f"publish {one.tenant}" for one in records] + [f"withdraw {one}" for one in withdrawn]

    def note_all(self, events: Iterable[AdminEvent]) -> Sequence[int]:
        self.done += [f"{event.name} {event.outcome}" for event in events]
        return [1]

    def bar_tenant(self, tenant: str, **_: Any) -> Sequence[Any]:
        self.done.append(f"bar {tenant}")
        return ()

    def readmit_tenant(self, tenant: str, **_: Any) -> bool:
        self.done.append(f"readmit {tenant}")
        return True

    def tenant_remains(self, _tenant: str) -> Sequence[str]:
        return self.left


@pytest.fixture
def deployment(monkeypatch: pytest.MonkeyPatch) -> Deployment:
    made = Deployment({"acme": FULL})
    monkeypatch.setattr(tenants, "tenant_topic", lambda *_: made)
    monkeypatch.setattr(tenants, "ClusterAdmin", lambda _: Cluster({"replies.hooli": (1,)}))
    monkeypatch.setattr(Tenants, "_locked", lambda _: nullcontext())
    monkeypatch.setattr(Tenants, "_create_topics", lambda _, spec: made.done.append(f"topics {spec.tenant}"))
    return made


def office_of(deployment: Any) -> Tenants:
    settings = Settings.model_validate({"allow_open_kafka": True})
    return Tenants(settings, default_codec(), deployment, deployment)


def test_the_rights_of_a_removed_tenant_are_taken_first(deployment: Deployment) -> None:
    office_of(deployment).remove("acme", etag_of(FULL), Author("key:1"))
    assert deployment.done == ["tenant_removed started", "bar acme", "withdraw acme", "tenant_removed done"]


def test_a_tenant_that_comes_back_is_let_in_when_all_is_there(deployment: Deployment) -> None:
    office, wanted = office_of(deployment), TenantSpec("hooli", managed_by=API)
    with pytest.raises(TenantConflictError, match=r"\(topics replies\.hooli\)"):
        office.set(wanted, None, Author("key:1"), adopt=False)
    assert deployment.done == []
    office.set(wanted, None, Author("key:1"), adopt=False, restore=True)
    steps = ["topics hooli", "publish hooli", "readmit hooli"]
    assert deployment.done == ["tenant_set started", *steps, "tenant_set done"]


def test_a_new_tenant_and_a_changed_one_are_not_let_in_by_the_way(deployment: Deployment) -> None:
    office = office_of(deployment)
    office.set(TenantSpec("initech", managed_by=API), None, Author("key:1"), adopt=False)
    deployment.left = [BARRED_TENANTS]
    office.set(replace(FULL, weight=3.0), etag_of(FULL), Author("key:1"), adopt=False)
    assert not any(step.startswith("readmit") for step in deployment.done)
    with pytest.raises(TenantConflictError, match=r"\(it is barred\)"):
        office.set(TenantSpec("dunder", managed_by=API), None, Author("key:1"), adopt=False)


def test_a_pool_is_dedicated_to_one_tenant() -> None:
    with pytest.raises(TenantConflictError) as wrong:
        decide_set({"globex": replace(OF_FILE, pool="own")}, FULL, None, adopt=False)
    assert wrong.value.field == "pool"


def test_the_file_leaves_the_apis_tenants_alone() -> None:
    of_api = {"acme": FULL, "initech": TenantSpec("initech", managed_by=API)}
    published = {**of_api, "globex": OF_FILE, "gone": TenantSpec("gone")}
    assert managed_by_api(published) == of_api
    file = {"acme": TenantSpec("acme"), "globex": OF_FILE, "new": TenantSpec("new")}
    made = compare(file, published, managed_by_api(published))
    assert [*made.changed] == ["new"]
    assert (made.unchanged, made.unknown, made.foreign) == (("globex",), ("gone",), ("acme",))
    forced = compare(file, published, of_api.keys() - file.keys())
    assert [*forced.changed] == ["acme", "new"]
    assert forced.unknown == ("gone",)


def test_no_command_forgets_a_tenant_of_the_api() -> None:
    found = with_api_tenants([TenantSpec("acme"), OF_FILE], {"acme": FULL, "unreadable": None, "globex": OF_FILE})
    assert found == (FULL, OF_FILE)
