"""The error tree."""

import pickle

import pytest

from fairlane import errors
from fairlane.errors import (
    AnsweredElsewhere,
    Cancelled,
    Expired,
    Failed,
    FairlaneError,
    PublishFailed,
    Rejected,
    Timeout,
    Unsuccessful,
    unsuccessful_error,
)
from fairlane.outcomes import Outcome
from fairlane.records import InferenceReply, Output

REFUSAL = InferenceReply(
    "id-1",
    "acme",
    "rejected",
    code="overloaded",
    field="model",
    message="the queue is full",
    retry_after_ms=250,
    output=Output(text="never shown"),
)


def test_every_outcome_has_its_error() -> None:
    kinds = {outcome: type(unsuccessful_error(InferenceReply("id", "acme", outcome))) for outcome in Outcome}
    assert kinds == {
        Outcome.OK: type(None),
        Outcome.REJECTED: Rejected,
        Outcome.EXPIRED: Expired,
        Outcome.CANCELLED: Cancelled,
        Outcome.FAILED: Failed,
    }


def test_an_outcome_of_a_later_version_is_a_failure_that_says_its_name() -> None:
    error = unsuccessful_error(InferenceReply("id", "acme", "melted"))
    assert type(error) is Failed
    assert "melted" in str(error)


def test_a_refusal_tells_all_it_knows() -> None:
    error = unsuccessful_error(REFUSAL)
    assert isinstance(error, Rejected)
    assert (error.request_id, error.code, error.retry_after_ms, error.field, error.message) == (
        "id-1",
        "overloaded",
        250,
        "model",
        "the queue is full",
    )
    assert error.reply is REFUSAL
    assert str(error) == ("request id-1: rejected (overloaded), field model, the queue is full, retry after 250 ms")


@pytest.mark.parametrize(
    "error",
    [
        Rejected(REFUSAL),
        PublishFailed("id", "requests.acme", "no such topic", uncertain=True),
        AnsweredElsewhere("id", "replies.acme.x"),
        Timeout("late"),
    ],
)
def test_errors_survive_pickling_and_print_no_output(error: FairlaneError) -> None:
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)
    assert "never shown" not in repr(error)


def test_the_tree_has_one_root() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert all(issubclass(kind, FairlaneError) for kind in kinds)
    assert {kind.__name__ for kind in kinds if issubclass(kind, Unsuccessful)} == {
        "Unsuccessful",
        "Rejected",
        "Expired",
        "Cancelled",
        "Failed",
    }
    assert issubclass(Timeout, TimeoutError)
