"""Building a request, and the mistakes that are found before anything is sent."""

import uuid
from dataclasses import fields, replace
from typing import Any, get_type_hints

import pytest

from fairlane.client.requests import RequestFields, build_request, check_request, new_request_id
from fairlane.clock import now_ms
from fairlane.records import InferenceRequest, Message, Parameters, RequestInput

GOOD: dict[str, dict[str, Any]] = {
    "chat": {"model": "m", "messages": [{"role": "system", "content": "s"}, Message("user", "u")]},
    "prompt": {"model": "m", "prompt": "p", "stop": "\n", "max_tokens": 5, "temperature": 0.7, "seed": -1},
    "embed": {"model": "m", "task": "embed", "texts": ["a", "b"]},
    "rank": {"model": "m", "task": "rank", "query": "q", "documents": ["a", "b"], "priority": "low"},
    "classify": {"model": "m", "task": "classify", "image": b"\x00", "timeout_ms": 1},
    "conversation": {"model": "m", "prompt": "p", "conversation_id": "c", "conversation_after": str(uuid.uuid4())},
    "cache": {"model": "m", "prompt": "p", "cache": "semantic"},
    "service": {"model": "m", "prompt": "p", "reply_to": "replies.acme.billing", "metadata": {"k": "v"}},
}

BAD: list[tuple[str, dict[str, Any]]] = [
    ("model", {"model": "", "prompt": "p"}),
    ("task", {"model": "m", "task": "sing", "prompt": "p"}),
    ("messages", {"model": "m"}),
    ("messages", {"model": "m", "messages": [{"role": "user", "content": "c"}], "prompt": "p"}),
    ("messages", {"model": "m", "messages": []}),
    ("messages", {"model": "m", "messages": [{"role": "boss", "content": "c"}]}),
    ("messages", {"model": "m", "messages": [{"content": "c"}]}),
    ("prompt", {"model": "m", "prompt": ""}),
    ("prompt", {"model": "m", "task": "embed", "texts": ["a"], "prompt": "p"}),
    ("texts", {"model": "m", "task": "embed"}),
    ("texts", {"model": "m", "task": "embed", "texts": []}),
    ("texts", {"model": "m", "task": "embed", "texts": "one"}),
    ("query", {"model": "m", "task": "rank", "documents": ["a"]}),
    ("documents", {"model": "m", "task": "rank", "query": "q"}),
    ("documents", {"model": "m", "task": "rank", "query": "q", "documents": "one"}),
    ("image", {"model": "m", "task": "classify", "image": b""}),
    ("cache", {"model": "m", "prompt": "p", "cache": "always"}),
    ("conversation_id", {"model": "m", "prompt": "p", "conversation_id": ""}),
    ("conversation_id", {"model": "m", "prompt": "p", "conversation_id": "x" * 129}),
    ("conversation_id", {"model": "m", "task": "embed", "texts": ["a"], "conversation_id": "c"}),
    ("conversation_after", {"model": "m", "prompt": "p", "conversation_after": str(uuid.uuid4())}),
    ("conversation_after", {"model": "m", "prompt": "p", "conversation_id": "c", "conversation_after": "first"}),
    ("priority", {"model": "m", "prompt": "p", "priority": "urgent"}),
    ("timeout_ms", {"model": "m", "prompt": "p", "timeout_ms": 0}),
    ("timeout_ms", {"model": "m", "prompt": "p", "timeout_ms": 1.5}),
    ("timeout_ms", {"model": "m", "prompt": "p", "timeout_ms": 2**63}),
    ("max_tokens", {"model": "m", "prompt": "p", "max_tokens": -1}),
    ("max_tokens", {"model": "m", "prompt": "p", "max_tokens": True}),
    ("temperature", {"model": "m", "prompt": "p", "temperature": float("nan")}),
    ("temperature", {"model": "m", "prompt": "p", "temperature": -0.1}),
    ("top_p", {"model": "m", "prompt": "p", "top_p": 0.0}),
    ("top_p", {"model": "m", "prompt": "p", "top_p": float("nan")}),
    ("seed", {"model": "m", "prompt": "p", "seed": 2**63}),
    ("stop", {"model": "m", "prompt": "p", "stop": ["", "x"]}),
    ("logprobs", {"model": "m", "prompt": "p", "logprobs": 21}),
    ("logprobs", {"model": "m", "prompt": "p", "logprobs": -1}),
    ("reply_to", {"model": "m", "prompt": "p", "reply_to": "replies.acme2"}),
    ("reply_to", {"model": "m", "prompt": "p", "reply_to": ""}),
    ("metadata", {"model": "m", "prompt": "p", "metadata": {"k": 1}}),
    ("request_id", {"model": "m", "prompt": "p", "request_id": "42"}),
    ("request_id", {"model": "m", "prompt": "p", "request_id": ""}),
]


@pytest.mark.parametrize("name", GOOD)
def test_a_good_request_passes(name: str) -> None:
    check_request(build_request(**GOOD[name]), "acme")


@pytest.mark.parametrize(("field", "fields"), BAD, ids=[f"{field}-{at}" for at, (field, _) in enumerate(BAD)])
def test_a_mistake_is_named_by_its_field(field: str, fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"^{field}: "):
        check_request(build_request(**fields), "acme")


def test_no_message_shows_the_input() -> None:
    with pytest.raises(ValueError, match=r"^prompt: ") as caught:
        check_request(build_request(model="m", task="embed", texts=["secret text"], prompt="secret text"), "acme")
    assert "secret" not in str(caught.value)


def test_another_tenant_in_the_record_is_a_mistake() -> None:
    request = replace(build_request(model="m", prompt="p"), tenant="globex")
    with pytest.raises(ValueError, match=r"^tenant: 'globex'"):
        check_request(request, "acme")
    check_request(replace(request, tenant="acme"), "acme")


def test_the_fields_become_the_record() -> None:
    built = build_request(
        model="m",
        messages=[{"role": "user", "content": "hi"}],
        stop="END",
        max_tokens=3,
        logprobs=0,
        group="night",
        request_id=str(uuid.UUID(int=1)),
    )
    assert built == InferenceRequest(
        request_id="00000000-0000-0000-0000-000000000001",
        model="m",
        task="generate",
        input=RequestInput(messages=(Message("user", "hi"),)),
        parameters=Parameters(max_tokens=3, stop=("END",), logprobs=0),
        group="night",
    )


def test_an_unknown_field_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="promt"):
        build_request(model="m", promt="p")  # type: ignore[call-arg]  # the mistake under test


def test_every_typed_keyword_is_a_field_of_the_record() -> None:
    records = (InferenceRequest, RequestInput, Parameters)
    assert get_type_hints(RequestFields).keys() <= {entry.name for record in records for entry in fields(record)}


def test_a_request_needs_a_model() -> None:
    with pytest.raises(TypeError, match="model"):
        build_request(prompt="p")  # type: ignore[call-arg]  # the mistake under test


def test_request_ids_are_uuids_that_sort_by_time() -> None:
    before = now_ms()
    ids = [uuid.UUID(new_request_id()) for _ in range(1_000)]
    after = now_ms()
    assert len(set(ids)) == len(ids)
    assert {(value.version, value.variant) for value in ids} == {(7, uuid.RFC_4122)}
    assert all(before <= value.int >> 80 <= after for value in ids)
