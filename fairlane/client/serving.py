"""Reply services for a process that does nothing else."""

from typing import TYPE_CHECKING, Unpack

from fairlane.client.aio import AsyncClient
from fairlane.client.base import ReplyOptions
from fairlane.client.sync import Client
from fairlane.settings import KafkaSettings

if TYPE_CHECKING:
    from fairlane.client.handler_retries import HandlerRetries
    from fairlane.client.reply_service import (
        AsyncOnDeadLetter,
        AsyncReplyHandler,
        AsyncReplyService,
        OnDeadLetter,
        ReplyHandler,
        ReplyService,
    )


def replies(
    group_id: str,
    handler: "ReplyHandler",
    *,
    tenant: str,
    bootstrap_servers: str | None = None,
    settings: KafkaSettings | None = None,
    retries: "HandlerRetries | None" = None,
    on_dead_letter: "OnDeadLetter | None" = None,
    **options: Unpack[ReplyOptions],
) -> "ReplyService":
    """A loop that gives each reply of a tenant's topic to a handler, at least once; ``run`` it.

    .. code-block:: python

        fairlane.replies("billing", book, tenant="acme", service="billing").run()

    :meth:`Client.serve_replies` of a client made for it, which says what the arguments are; ``run`` closes all that it
    opened. Without ``topic`` or ``service`` it reads ``replies.<tenant>``.

    Args:
        group_id: of the consumer group; TOPIC_PREFIX comes before it.
        handler: takes a reply, at least once. A call that raises is made again.
        tenant: whose replies.
        bootstrap_servers: brokers to start from; default: ``KAFKA_BOOTSTRAP_SERVERS``.
        settings: the connection, with its security; default: from the environment.
        retries: how often and after which waits.
        on_dead_letter: takes what the handler failed on at every try, and what is no reply, instead of the topic.
        options: those of ``serve_replies``.

    Raises:
        ValueError: an argument is wrong; the message begins with its name.
        Unavailable: the settings of the connection are wrong.
    """
    client = Client(tenant, bootstrap_servers, settings=settings)
    return client.serve_replies(group_id, handler, retries=retries, on_dead_letter=on_dead_letter, **options)


def async_replies(
    group_id: str,
    handler: "AsyncReplyHandler",
    *,
    tenant: str,
    bootstrap_servers: str | None = None,
    settings: KafkaSettings | None = None,
    retries: "HandlerRetries | None" = None,
    on_dead_letter: "AsyncOnDeadLetter | None" = None,
    **options: Unpack[ReplyOptions],
) -> "AsyncReplyService":
    """:func:`replies` for asyncio: the handler and ``on_dead_letter`` are coroutine functions, ``run`` is awaited.

    .. code-block:: python

        await fairlane.async_replies("billing", book, tenant="acme", service="billing").run()
    """
    client = AsyncClient(tenant, bootstrap_servers, settings=settings)
    return client.serve_replies(group_id, handler, retries=retries, on_dead_letter=on_dead_letter, **options)
