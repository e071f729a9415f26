"""Client quotas of Kafka users. No client library for Python has these requests, so they are sent with aiokafka's.

Source of the messages: ``DescribeClientQuotas`` and ``AlterClientQuotas`` of Kafka's protocol guide, versions 0.
"""

import asyncio
from collections.abc import Mapping
from typing import Any, Final

from aiokafka.client import AIOKafkaClient
from aiokafka.errors import KafkaError, for_code
from aiokafka.helpers import create_ssl_context
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import Array, Boolean, Float64, Int8, Int16, Int32, Schema, String

from fairlane.kafka_config import authorities
from fairlane.settings import KafkaSettings
from fairlane_server.kafka.cluster_admin import REQUEST_TIMEOUT_S, ClusterError, unreachable

_USER: Final = "user"
_ANY_NAME: Final = 2
"""Match type: every user that has quotas."""
_TEXT = String("utf-8")
_ENTITY = Array(("entity_type", _TEXT), ("entity_name", _TEXT))


class _DescribeResponse(Response):  # type: ignore[misc]  # aiokafka has no types
    API_KEY = 48
    API_VERSION = 0
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        ("error_code", Int16),
        ("error_message", _TEXT),
        ("entries", Array(("entity", _ENTITY), ("values", Array(("key", _TEXT), ("value", Float64))))),
    )


class _DescribeRequest(RequestStruct):  # type: ignore[misc]
    API_KEY = 48
    API_VERSION = 0
    RESPONSE_TYPE = _DescribeResponse
    SCHEMA = Schema(
        ("components", Array(("entity_type", _TEXT), ("match_type", Int8), ("match", _TEXT))), ("strict", Boolean)
    )


class _AlterResponse(Response):  # type: ignore[misc]
    API_KEY = 49
    API_VERSION = 0
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        ("entries", Array(("error_code", Int16), ("error_message", _TEXT), ("entity", _ENTITY))),
    )


class _AlterRequest(RequestStruct):  # type: ignore[misc]
    API_KEY = 49
    API_VERSION = 0
    RESPONSE_TYPE = _AlterResponse
    SCHEMA = Schema(
        (
            "entries",
            Array(
                ("entity", _ENTITY),
                ("ops", Array(("key", _TEXT), ("value", Float64), ("remove", Boolean))),
            ),
        ),
        ("validate_only", Boolean),
    )


class _Describe(Request[_DescribeRequest]):  # type: ignore[misc]
    API_KEY = 48

    def build(self, request_struct_class: type[_DescribeRequest]) -> _DescribeRequest:
        return request_struct_class([(_USER, _ANY_NAME, None)], True)


class _Alter(Request[_AlterRequest]):  # type: ignore[misc]
    API_KEY = 49

    def __init__(self, changes: Mapping[str, Mapping[str, float | None]]) -> None:
        self._entries = [([(_USER, user)], [*map(_operation, quotas.items())]) for user, quotas in changes.items()]

    def build(self, request_struct_class: type[_AlterRequest]) -> _AlterRequest:
        return request_struct_class(self._entries, False)


def _operation(quota: tuple[str, float | None]) -> tuple[str, float, bool]:
    key, value = quota
    return key, 0.0 if value is None else value, value is None


def read_quotas(settings: KafkaSettings) -> dict[str, dict[str, float]]:
    """The client quotas of every user by name and by Kafka's keys. Raises ClusterError."""
    answer = asyncio.run(_ask(settings, _Describe()))
    _check(answer.error_code, answer.error_message)
    return {name: dict(values) for entity, values in answer.entries for kind, name in entity if kind == _USER and name}


def alter_quotas(settings: KafkaSettings, changes: Mapping[str, Mapping[str, float | None]]) -> dict[str, str | None]:
    """Set the quotas of these users; None removes one. Returns the reason of each failure, None where it was done.

    Raises ClusterError when no broker answers.
    """
    answer = asyncio.run(_ask(settings, _Alter(changes)))
    return {
        name: (message or for_code(code).__name__) if code else None
        for code, message, entity in answer.entries
        for _, name in entity
    }


def _check(code: int, message: str | None) -> None:
    if code:
        raise ClusterError(f"client quotas: {message or for_code(code).__name__}")


async def _ask(settings: KafkaSettings, request: Request[Any]) -> Any:
    client = AIOKafkaClient(
        bootstrap_servers=settings.kafka_bootstrap_servers,
        request_timeout_ms=round(REQUEST_TIMEOUT_S * 1000),
        **_security(settings),
    )
    try:
        await client.bootstrap()
        node = client.get_random_node()
        if node is None:
            raise ClusterError("no broker has joined the cluster")
        return await client.send(node, request)
    except (KafkaError, TimeoutError) as error:
        raise unreachable(settings, str(error) or type(error).__name__) from None
    finally:
        await client.close()


def _security(settings: KafkaSettings) -> dict[str, Any]:
    options: dict[str, Any] = {"security_protocol": settings.kafka_security_protocol}
    if settings.kafka_security_protocol.endswith("SSL"):
        options["ssl_context"] = create_ssl_context(**authorities(settings))
    if (credentials := settings.kafka_credentials()) is not None:
        options["sasl_mechanism"] = settings.kafka_sasl_mechanism
        options["sasl_plain_username"] = credentials.username
        options["sasl_plain_password"] = credentials.password
    return options
