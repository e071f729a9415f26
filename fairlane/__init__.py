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
        AsyncTextStream,
        Client,
        Handle,
        RetryPolicy,
        TextDelta,
        TextStream,
    )
    from fairlane.client.reply_service import AsyncReplyService, DeadLetter, ReplyService, async_replies, replies
    from fairlane.client.retry_policies import HandlerRetries
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

_NAMES_BY_MODULE = {
    "fairlane.client": (
        "AsyncClient",
        "AsyncHandle",
        "AsyncTextStream",
        "Client",
        "Handle",
        "RetryPolicy",
        "TextDelta",
        "TextStream",
    ),
    "fairlane.client.reply_service": (
        "AsyncReplyService",
        "DeadLetter",
        "ReplyService",
        "async_replies",
        "replies",
    ),
    "fairlane.client.retry_policies": ("HandlerRetries",),
    "fairlane.errors": (
        "AnsweredElsewhere",
        "Backpressure",
        "Cancelled",
        "ClientClosed",
        "Expired",
        "Failed",
        "FairlaneError",
        "PublishFailed",
        "Rejected",
        "Timeout",
        "Unavailable",
        "Unsuccessful",
    ),
    "fairlane.outcomes": ("Code", "FinishReason", "Outcome", "Priority", "Task"),
    "fairlane.records": (
        "InferenceReply",
        "InferenceRequest",
        "LabelScore",
        "Message",
        "Output",
        "Parameters",
        "RequestInput",
        "Retrieval",
        "Timings",
        "TokenLogprob",
        "TokenUsage",
        "TopLogprob",
    ),
    "fairlane.settings": ("KafkaSettings",),
}
_MODULE_BY_NAME = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}


def __getattr__(name: str) -> Any:
    module = _MODULE_BY_NAME.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
