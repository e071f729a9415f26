"""Answers on their way out."""

import json

import pytest

from producers.gateway.native.response_bodies import accepted, accepted_answer
from producers.gateway.results.request_status import RequestState

ID = "0b1f6a52-5a5e-4a0c-9a8e-2f1f4f1c9d11"


@pytest.mark.parametrize("status", RequestState)
def test_an_acceptance_is_what_its_model_says(status: RequestState) -> None:
    answer = accepted(ID, status)
    assert answer.body == accepted_answer(ID, status).as_json()
    assert answer.headers["location"] == json.loads(bytes(answer.body))["links"]["self"]
    assert (answer.status_code, answer.headers["cache-control"]) == (202, "no-store")
    assert answer.headers["content-type"] == "application/json"
