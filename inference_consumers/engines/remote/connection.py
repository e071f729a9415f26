"""HTTP to one endpoint: bounded answers, no redirects, verified certificates, and errors by whose fault they are."""

import contextlib
import re
import ssl
from collections.abc import AsyncGenerator, Callable, Iterator
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import httpx
import msgspec

from fairlane.outcomes import Code
from inference_consumers.engines.protocol import Failure
from inference_consumers.engines.remote.endpoints import ModelEndpoint, ModelEndpoints
from inference_consumers.engines.remote.errors import (
    UNREADABLE,
    EndpointBusyError,
    EndpointFailedError,
    EndpointKeyError,
    EndpointUnreachableError,
    ItemRefusedError,
)
from inference_consumers.engines.remote.event_stream import EventStream, EventStreamError

MOST_ANSWER_BYTES = 64 << 20
"""Of an answer that does not stream, and of all parts of one that does."""
_MOST_EVENT_BYTES = 4 << 20
_MOST_REFUSAL_BYTES = 64 << 10
_MOST_KEY_BYTES = 8 << 10
_CHECKS = 2
"""Connections beside those of the items."""

_KEEPALIVE_S = 2.0
"""Shorter than that of servers (uvicorn: 5 s), which may close a connection while a request is on its way."""

_BUSY_REST_S = 1.0
_LEAST_REST_S = 0.1
LONGEST_REST_S = 30.0
"""What a server asks for in Retry-After counts up to this."""

_REFUSALS = frozenset({400, 413, 422})
_BUSY, _UNAVAILABLE = 429, 503
_TOO_LARGE = 413
_CONTEXT_CODES = frozenset({"context_length_exceeded", "string_above_max_length"})
# Words of servers for a prompt that is too long, where they have no code for it.
_CONTEXT_WORDS = re.compile(
    r"context (?:length|size|window)|max_model_len|max_seq_len|maximum (?:input|sequence|allowed) length"
    r"|too many tokens"
    r"|exceeds? (?:the )?(?:maximum|available) .{0,40}(?:tokens|length)|must have less than \d+ tokens",
    re.IGNORECASE,
)
_PARAMETERS = frozenset({"max_tokens", "temperature", "top_p", "stop", "seed", "logprobs"})


class _ErrorBody(msgspec.Struct):
    """An error as OpenAI writes it (an object below ``error``), older vLLM (flat) and v2 servers (a text)."""

    error: Any = None
    message: Any = None
    code: Any = None
    param: Any = None
    detail: Any = None


class EndpointConnection:
    """A client of one endpoint. Its methods raise EndpointFailedError, EndpointBusyError and ItemRefusedError."""

    def __init__(self, endpoint: ModelEndpoint, entry: ModelEndpoints) -> None:
        """Raises EndpointKeyError."""
        self.endpoint = endpoint
        self.served_name = endpoint.served_name or entry.model
        self.idle_timeout_s = entry.idle_timeout_s
        self._headers = {"Accept-Encoding": "identity"}
        self.read_key()
        idle = httpx.Timeout(entry.idle_timeout_s, connect=entry.connect_timeout_s, pool=entry.connect_timeout_s)
        most = endpoint.max_concurrent + _CHECKS
        self._client = httpx.AsyncClient(
            timeout=idle,
            limits=httpx.Limits(max_connections=most, max_keepalive_connections=most, keepalive_expiry=_KEEPALIVE_S),
            verify=_certificates(endpoint),
            follow_redirects=False,
            trust_env=False,
        )

    def read_key(self) -> None:
        """Read the key from its file; again, so that a key can be replaced. Raises EndpointKeyError."""
        if self.endpoint.api_key_file is None:
            return
        file = Path(self.endpoint.api_key_file)
        try:
            with file.open("rb") as opened:
                key = opened.read(_MOST_KEY_BYTES + 1).decode("ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise EndpointKeyError(f"the key in {file} cannot be read: {type(error).__name__}") from None
        if not key or not key.isprintable() or len(key) > _MOST_KEY_BYTES:
            raise EndpointKeyError(f"{file} holds no key")
        self._headers["Authorization"] = f"Bearer {key}"

    async def get(self, path: str) -> bytes:
        """The body of an answer that must be a 200."""
        with _failures():
            async with self._client.stream("GET", self.endpoint.url + path, headers=self._headers) as response:
                await _check(response, refuses_items=False)
                return await _body(response, MOST_ANSWER_BYTES)

    async def post(self, path: str, content: bytes) -> bytes:
        """The body of an answer that must be a 200."""
        with _failures():
            async with self._post(path, content) as response:
                await _check(response, refuses_items=True)
                return await _body(response, MOST_ANSWER_BYTES)

    async def events(self, path: str, content: bytes) -> AsyncGenerator[bytes, None]:
        """The data of the events of an answer, as they come. Close it to close the connection. Comments and other
        fields, with which servers keep a connection open, are dropped: the caller bounds the time between two events.
        """
        with _failures():
            async with self._post(path, content) as response:
                await _check(response, refuses_items=True)
                events = EventStream(_MOST_EVENT_BYTES)
                seen = 0
                async for part in response.aiter_raw():
                    seen += len(part)
                    if seen > MOST_ANSWER_BYTES:
                        raise EndpointFailedError(f"its answer is longer than {MOST_ANSWER_BYTES} bytes")
                    for data in events.feed(part):
                        yield data

    async def close(self) -> None:
        await self._client.aclose()

    def _post(self, path: str, content: bytes) -> contextlib.AbstractAsyncContextManager[httpx.Response]:
        headers = {**self._headers, "Content-Type": "application/json"}
        return self._client.stream("POST", self.endpoint.url + path, headers=headers, content=content)


def _certificates(endpoint: ModelEndpoint) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=endpoint.ca_file)
    except OSError as error:
        # ssl.SSLError is one.
        raise EndpointKeyError(f"{endpoint.ca_file} cannot be used: {type(error).__name__}") from None


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
        raise EndpointUnreachableError(f"the connection failed: {type(error).__name__}") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        # Not the error's own text: it may quote the URL.
        raise EndpointFailedError(f"the connection failed: {type(error).__name__}") from error
    except EventStreamError as error:
        raise EndpointFailedError(str(error)) from error


async def _check(response: httpx.Response, *, refuses_items: bool) -> None:
    status = response.status_code
    if status == httpx.codes.OK:
        if response.headers.get("Content-Encoding", "identity") != "identity":
            # It was asked for none, and a small answer could unpack to anything.
            raise EndpointFailedError("its answer is compressed")
        return
    asked_s = retry_after_s(response.headers.get("Retry-After"), lambda: datetime.now(UTC))
    if status == _BUSY or (status == _UNAVAILABLE and asked_s is not None):
        rest_s = _BUSY_REST_S if asked_s is None else asked_s
        raise EndpointBusyError(f"it answered {status}", min(max(rest_s, _LEAST_REST_S), LONGEST_REST_S))
    if status in _REFUSALS and refuses_items:
        raise ItemRefusedError(refusal(status, await _beginning(response, _MOST_REFUSAL_BYTES)))
    raise EndpointFailedError(f"it answered {status}")


async def _body(response: httpx.Response, most_bytes: int) -> bytes:
    body = bytearray()
    async for part in response.aiter_raw():
        body += part
        if len(body) > most_bytes:
            raise EndpointFailedError(f"its answer is longer than {most_bytes} bytes")
    return bytes(body)


async def _beginning(response: httpx.Response, most_bytes: int) -> bytes:
    body = bytearray()
    async for part in response.aiter_raw():
        body += part
        if len(body) > most_bytes:
            break
    return bytes(body[:most_bytes])


def refusal(status: int, body: bytes) -> Failure:
    """The failure of an item that a server refused with 400, 413 or 422. A prompt that is too long is told from the
    rest by the code or the words of the server, none of which are repeated."""
    message = code = param = None
    with contextlib.suppress(*UNREADABLE):
        given = msgspec.json.decode(body, type=_ErrorBody)
        inner = given.error if isinstance(given.error, dict) else {}
        message = inner.get("message") or given.message or given.error or given.detail
        code, param = inner.get("code") or given.code, inner.get("param") or given.param
    # Servers put numbers and lists there too.
    words, code, param = (one if isinstance(one, str) else "" for one in (message, code, param))
    if status == _TOO_LARGE or code in _CONTEXT_CODES or _CONTEXT_WORDS.search(words):
        return Failure(
            Code.CONTEXT_TOO_LONG, f"the input is longer than the server takes: it answered {status}", "input"
        )
    field = f"parameters.{param}" if param in _PARAMETERS else "input"
    return Failure(Code.INVALID, f"the server refuses the request: it answered {status}", field)


def retry_after_s(stated: str | None, now: Callable[[], datetime]) -> float | None:
    """Of the header (RFC 9110, section 10.2.3): seconds, or a date; None for none and for what is neither."""
    if stated is None:
        return None
    if stated.isascii() and stated.isdigit() and len(stated) < 10:
        return float(stated)
    try:
        at = parsedate_to_datetime(stated)
    except (ValueError, OverflowError):
        return None
    return max(0.0, (at.replace(tzinfo=at.tzinfo or UTC) - now()).total_seconds())
