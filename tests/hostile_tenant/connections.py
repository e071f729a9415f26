"""Connections to a broker as any user, over which raw requests are sent."""

from typing import Any

from aiokafka.conn import AIOKafkaConnection, ScramAuthenticator
from aiokafka.errors import KafkaConnectionError, KafkaError

from tests.hostile_tenant.messages import RawRequest, Versions

MECHANISM = "SCRAM-SHA-512"
TIMEOUT_MS = 60_000
"""Beyond the longest delay with which a broker throttles a user."""


class UnansweredError(Exception):
    """The broker closed the connection, or said nothing."""


class Connection:
    """To one broker. As nobody, where the broker asks for no password."""

    def __init__(self, servers: str, user: str | None = None, password: str = "") -> None:
        host, port = servers.rsplit(":", 1)
        security = {"security_protocol": "SASL_PLAINTEXT", "sasl_mechanism": MECHANISM}
        login = {} if user is None else {**security, "sasl_plain_username": user, "sasl_plain_password": password}
        self._connection = _Connection(host, int(port), client_id="hostile", request_timeout_ms=TIMEOUT_MS, **login)

    async def __aenter__(self) -> "Connection":
        """Raises aiokafka's KafkaError when the log-in fails."""
        await self._connection.connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._connection.close()

    @property
    def versions(self) -> dict[int, Versions]:
        """What the broker offers, by the number of the request."""
        return {key: Versions(*ends) for key, ends in self._connection._versions.items()}

    async def ask(self, request: RawRequest) -> dict[str, Any]:
        """The answer. Raises UnansweredError."""
        try:
            answer: dict[str, Any] = await self._connection.send(request)
        except (KafkaConnectionError, TimeoutError) as error:
            raise UnansweredError(str(error) or type(error).__name__) from None
        return answer


async def can_log_in(servers: str, user: str, password: str, acting_as: str = "") -> bool:
    """Whether the broker lets this user in; with ``acting_as`` in the name of another one."""
    connection = Connection(servers, user, password)
    connection._connection.acting_as = acting_as
    try:
        async with connection:
            return True
    except KafkaError:
        return False


class _Connection(AIOKafkaConnection):  # type: ignore[misc]  # aiokafka has no types
    """One whose log-in may name a user to act as (RFC 5802, section 5: ``authzid``)."""

    acting_as = ""

    def authenticator_scram(self) -> Any:
        if not self.acting_as:
            return super().authenticator_scram()
        return _ActingAs(
            self.acting_as,
            loop=self._loop,
            sasl_plain_password=self._sasl_plain_password,
            sasl_plain_username=self._sasl_plain_username,
            sasl_mechanism=self._sasl_mechanism,
        )


class _ActingAs(ScramAuthenticator):  # type: ignore[misc]
    def __init__(self, user: str, **others: Any) -> None:
        self._user = user.replace("=", "=3D").replace(",", "=2C")
        super().__init__(**others)

    def first_message(self) -> str:
        return str(super().first_message()).replace("n,,", f"n,a={self._user},", 1)
