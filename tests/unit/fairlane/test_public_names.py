"""What `fairlane` offers by name. A change here is a change for everybody who uses it."""

import fairlane
from fairlane import client, errors


def test_the_public_names() -> None:
    assert fairlane.__all__ == [
        "AnsweredElsewhere",
        "AsyncClient",
        "AsyncHandle",
        "AsyncReplyService",
        "AsyncTextStream",
        "Backpressure",
        "Cancelled",
        "Client",
        "ClientClosed",
        "Code",
        "DeadLetter",
        "Expired",
        "Failed",
        "FairlaneError",
        "FinishReason",
        "Handle",
        "HandlerRetries",
        "InferenceReply",
        "InferenceRequest",
        "KafkaSettings",
        "LabelScore",
        "Message",
        "Outcome",
        "Output",
        "Parameters",
        "Priority",
        "PublishFailed",
        "Rejected",
        "ReplyService",
        "RequestInput",
        "Retrieval",
        "RetryPolicy",
        "Task",
        "TextDelta",
        "TextStream",
        "Timeout",
        "Timings",
        "TokenLogprob",
        "TokenUsage",
        "TopLogprob",
        "Unavailable",
        "Unsuccessful",
        "async_replies",
        "replies",
    ]


def test_every_public_name_is_there() -> None:
    for name in fairlane.__all__:
        assert getattr(fairlane, name).__name__ == name
        assert name in dir(fairlane)
    for name in client.__all__:
        assert getattr(client, name) is not None


def test_every_error_of_the_client_is_public() -> None:
    kinds = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)}
    assert kinds <= set(fairlane.__all__)


def test_other_names_are_attribute_errors() -> None:
    assert not hasattr(fairlane, "Dispatcher")
