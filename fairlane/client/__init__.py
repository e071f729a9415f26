"""The SDK an upstream service installs: publish requests, wait for replies, or iterate a reply topic.

Needs confluent-kafka and the light parts of this package; see :class:`Client` and :class:`AsyncClient`.
"""

from fairlane.client.aio import AsyncClient, AsyncHandle, AsyncReplyStream
from fairlane.client.base import ReplyOptions
from fairlane.client.handle import Handle
from fairlane.client.requests import RequestFields, new_request_id
from fairlane.client.stats import ClientStats
from fairlane.client.sync import Client, ReplyStream

__all__ = [
    "AsyncClient",
    "AsyncHandle",
    "AsyncReplyStream",
    "Client",
    "ClientStats",
    "Handle",
    "ReplyOptions",
    "ReplyStream",
    "RequestFields",
    "new_request_id",
]
