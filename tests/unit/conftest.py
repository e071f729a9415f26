"""A client without a broker, for the tests that want one."""

from collections.abc import Iterator

import pytest

from fairlane.client import Client
from tests.kit.client_fakes import FakeConnector, FakeProducer


@pytest.fixture
def kafka() -> FakeConnector:
    return FakeConnector()


@pytest.fixture
def producer(kafka: FakeConnector) -> FakeProducer:
    return kafka.made_producer


@pytest.fixture
def client(kafka: FakeConnector) -> Iterator[Client]:
    with Client("acme", connector=kafka, close_timeout_ms=0) as made:
        yield made
