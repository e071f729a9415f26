"""OpenAI's own client against a gateway, a broker, a dispatcher and consumers."""

from collections.abc import Iterator

import openai
import pytest

from tests.kit.gateway_kit import Served, serving
from tests.kit.openai_suite import QUESTION, OpenAISuite, Service
from tests.kit.stack import PostgresServer

pytestmark = pytest.mark.broker


@pytest.fixture(scope="module")
def served(
    broker: str, postgres: PostgresServer, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    with serving(broker, postgres, tmp_path_factory.mktemp("openai"), redis_url=redis_url) as served:
        yield served


def service_of(served: Served, tenant: str) -> Service:
    pipeline = served.pipeline
    return Service(served.url(), served.keys[tenant], pipeline.model_for("generate"), pipeline.model_for("embed"))


@pytest.fixture
def service(served: Served) -> Service:
    return service_of(served, "a")


class TestGateway(OpenAISuite):
    pass


def test_a_key_is_of_one_tenant(served: Served, unique: str) -> None:
    ids = set()
    for tenant in ("a", "b"):
        service = service_of(served, tenant)
        with service.client() as client:
            answer = client.chat.completions.create(
                model=service.model, messages=QUESTION, max_tokens=4, extra_headers={"Idempotency-Key": unique}
            )
            ids.add(answer.id)
    assert len(ids) == 2


def test_a_call_says_what_is_left_of_its_limit(service: Service) -> None:
    with service.client() as client:
        raw = client.chat.completions.with_raw_response.create(model=service.model, messages=QUESTION, max_tokens=4)
        assert int(raw.headers["x-ratelimit-remaining-requests"]) < int(raw.headers["x-ratelimit-limit-requests"])
        with pytest.raises(openai.BadRequestError) as raised:
            client.chat.completions.create(model=service.model, messages=QUESTION, max_tokens=4_000_000)
    assert raised.value.param == "max_tokens"
    assert "x-ratelimit-remaining-requests" in raised.value.response.headers
