"""Fairlane: multi-tenant inference on Kafka. Public names for services that send requests.

>>> from fairlane import Client
>>> with Client(tenant="acme") as client:
...     print(client.submit(model="smollm2-135m-instruct", prompt="The capital of France is").result(30).output.text)
Paris.

Names are loaded on first use, so ``import fairlane`` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fairlane.client import (
        AsyncClient,
        AsyncHandle,
        AsyncReplyService,
        AsyncTextStream,
        Client,
        DeadLetter,
        Handle,
        HandlerRetries,
        ReplyService,
        RetryPolicy,
        TextDelta,
        TextStream,
        async_replies,
        replies,
    )
    from fairlane.errors import (
        AnsweredElsewhere,
        Backpressure,
        Cancelled,
        ClientClosed,
        Expired,
        Failed,
        FairlaneError,
        PublishFailed,
        Rejected,
        Timeout,
        Unavailable,
        Unsuccessful,
    )
    from fairlane.outcomes import Code, FinishReason, Outcome, Priority, Task
    from fairlane.records import (
        InferenceReply,
        InferenceRequest,
        LabelScore,
        Message,
        Output,
        Parameters,
        RequestInput,
        Retrieval,
        Timings,
        TokenLogprob,
        TokenUsage,
        TopLogprob,
    )
    from fairlane.settings import KafkaSettings

__all__ = [
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

# Light modules first: a name of an outcome loads no client.
_MODULES = ("outcomes", "records", "errors", "settings", "client")


def __getattr__(name: str) -> Any:
    if name in __all__:
        for module in _MODULES:
            found = import_module(f"fairlane.{module}")
            if hasattr(found, name):
                return globals().setdefault(name, getattr(found, name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
