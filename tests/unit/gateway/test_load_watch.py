"""The watch over the load goes on after whatever was away; tenants name the models that they may use."""

from types import SimpleNamespace
from typing import Any

import pytest

from fairlane.backoff import Backoff
from fairlane.records import ModelRoute, ModelVersion, TenantSpec
from fairlane.schema_files import default_codec
from fairlane.schema_registry import RegistryError
from fairlane.settings import KafkaSettings
from fairlane_server.kafka.cluster_admin import ClusterError
from fairlane_server.kafka.load_board import LoadView
from fairlane_server.models.catalog import ModelCatalog
from producers.gateway.pipeline import load_watch
from producers.gateway.pipeline.load_watch import LoadWatch, RegistryFeeds
from tests.kit.waiting import eventually


class Feed:
    """Fails as often as the test says."""

    errors: list[Exception]
    trouble = None

    def __init__(self, *_: Any) -> None:
        pass

    def catch_up(self) -> None:
        if self.errors:
            raise self.errors.pop()

    def follow(self, _duration_s: float) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.mark.parametrize("error", [ClusterError("no broker"), RegistryError("no answer")])
def test_it_tries_again(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    views: list[LoadView] = []
    failures: list[BaseException] = []
    monkeypatch.setattr(load_watch, "LoadFeed", Feed)
    monkeypatch.setattr(Feed, "errors", [error, error], raising=False)
    watch = LoadWatch(KafkaSettings(), default_codec(), views.append, failures.append)
    monkeypatch.setattr(watch, "_backoff", Backoff(first_s=0.01, longest_s=0.01))
    watch.start()
    try:
        eventually(lambda: views or failures, what="a view")
    finally:
        watch.stop()
    assert not failures
    assert not Feed.errors


def test_a_tenant_names_versions_and_aliases_of_its_models_and_of_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    version = ModelVersion("words", "2", "gpu", "simulated", ("generate",), "words", 4_096, 512)
    catalog = ModelCatalog([version], [ModelRoute("words", 1, {"champion": "2"}, {})])
    tenants = {"acme": TenantSpec("acme"), "globex": TenantSpec("globex", models=("other",))}
    feeds = RegistryFeeds(KafkaSettings(), default_codec(), lambda _error: None)
    monkeypatch.setattr(feeds, "_tenants", SimpleNamespace(snapshot=tenants))
    monkeypatch.setattr(feeds, "_models", SimpleNamespace(catalog=catalog))
    known, unknown = ("words", "words/2", "words@champion"), ("words/3", "words@candidate", "other", "other/1", "")
    assert all(feeds.may_name("acme", reference) for reference in known)
    assert not any(feeds.may_name("acme", reference) for reference in unknown)
    # What it may not use is to it as what there is not.
    for tenant in ("globex", "nobody"):
        assert not any(feeds.may_name(tenant, reference) for reference in (*known, *unknown))
