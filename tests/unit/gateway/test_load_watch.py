"""The watch over the load goes on after whatever was away."""

from typing import Any

import pytest

from fairlane.backoff import Backoff
from fairlane.schema_files import default_codec
from fairlane.schema_registry import RegistryError
from fairlane.settings import KafkaSettings
from fairlane_server.kafka.cluster_admin import ClusterError
from fairlane_server.kafka.load_board import LoadView
from producers.gateway.pipeline import load_watch
from producers.gateway.pipeline.load_watch import LoadWatch
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
