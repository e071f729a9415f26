"""The SDK an upstream service installs: publish requests, wait for replies, stream or cancel them, read reply topics.

Needs confluent-kafka and the light parts of this package; see :class:`Client` and :class:`AsyncClient`.
"""

from fairlane.client.aio import AsyncClient, AsyncReplyStream, async_replies
from fairlane.client.base import ReplyOptions, ServiceOptions
from fairlane.client.conversation import AsyncConversation, Conversation
from fairlane.client.core import ClientStats
from fairlane.client.handle import AsyncHandle, Handle
from fairlane.client.reassembly import TextDelta
from fairlane.client.reply_service import AsyncReplyService, DeadLetter, ReplyService
from fairlane.client.requests import RequestFields, new_request_id
from fairlane.client.retry_policies import HandlerRetries, RetryPolicy
from fairlane.client.sync import Client, ReplyStream, replies
from fairlane.client.text_stream import AsyncTextStream, TextStream

__all__ = [
    "AsyncClient",
    "AsyncConversation",
    "AsyncHandle",
    "AsyncReplyService",
    "AsyncReplyStream",
    "AsyncTextStream",
    "Client",
    "ClientStats",
    "Conversation",
    "DeadLetter",
    "Handle",
    "HandlerRetries",
    "ReplyOptions",
    "ReplyService",
    "ReplyStream",
    "RequestFields",
    "RetryPolicy",
    "ServiceOptions",
    "TextDelta",
    "TextStream",
    "async_replies",
    "new_request_id",
    "replies",
]
