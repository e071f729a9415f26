"""Who calls: the headers of a call in, an identity or a refusal out, before any work."""

from typing import Protocol

from fairlane import metrics
from fairlane.clock import ClockMs
from fairlane.logs import get_logger
from fairlane_server.api_keys.api_key import looks_like_key
from producers.gateway.identity.principal import Identity
from producers.gateway.identity.refusals import Refusal, RefusedError, answer
from producers.gateway.limits.rate_buckets import RateBook, RatePolicy

log = get_logger(__name__)

MOST_CHARACTERS = 8_192 + len("Bearer ")
# Of one reason: whoever tries keys at random must not fill the disk. All are counted.
_LINES = RatePolicy(rate_per_s=5.0, burst=50)


class Verifier(Protocol):
    """Knows one kind of proof."""

    async def verify(self, text: str, address: str | None, /) -> Identity:
        """Whose it is, shown from this address. Raises RefusedError."""
        ...


class Authenticator:
    """Takes one API key or token of a call.

    Args:
        keys: verifies API keys.
        tokens: verifies tokens; None: none are taken.
        clock: milliseconds, for how often refusals are logged.
    """

    def __init__(self, keys: Verifier, tokens: Verifier | None, clock: ClockMs) -> None:
        self._keys = keys
        self._tokens = tokens
        self._refusals = Refusals(clock)

    async def authenticate(
        self, authorization: str | None, api_key_header: str | None, address: str | None = None
    ) -> Identity:
        """Who shows this: ``Authorization: Bearer KEY_OR_TOKEN`` or ``X-API-Key: KEY``, one of them.

        Raises GatewayError: 401 nobody, 403 an expired key or a disabled user, 429 too many keys in vain from this
        address, 503 when it cannot be known now.
        """
        try:
            shown = _shown(authorization, api_key_header)
            return await self._verify(shown, address, may_be_token=api_key_header is None)
        except RefusedError as error:
            self._refusals.tell(error.why, error.who)
            raise answer(error.why) from None

    async def _verify(self, shown: str, address: str | None, *, may_be_token: bool) -> Identity:
        if looks_like_key(shown):
            return await self._keys.verify(shown, address)
        if self._tokens is None or not may_be_token:
            raise RefusedError(Refusal.MALFORMED)
        return await self._tokens.verify(shown, address)


class Refusals:
    """Counts every refusal, and logs as many as anybody would read."""

    def __init__(self, clock: ClockMs) -> None:
        self._clock = clock
        self._book = RateBook(len(Refusal))
        self._unsaid = dict.fromkeys(Refusal, 0)

    def tell(self, why: Refusal, who: str | None) -> None:
        """Of one caller; ``who`` is no secret."""
        metrics.AUTHENTICATIONS_REFUSED.labels(reason=why).inc()
        if not self._book.take([why], _LINES, self._clock()).is_granted:
            self._unsaid[why] += 1
            return
        log.warning("authentication_refused", reason=why, who=who, not_logged_before=self._unsaid[why])
        self._unsaid[why] = 0


def _shown(authorization: str | None, api_key_header: str | None) -> str:
    """The one key or token of a call. Raises RefusedError."""
    if authorization is None and api_key_header is None:
        raise RefusedError(Refusal.MISSING)
    if authorization is None or api_key_header is None:
        text = authorization or api_key_header or ""
    else:
        # Two callers in one would be one of them by chance.
        raise RefusedError(Refusal.MALFORMED)
    if len(text) > MOST_CHARACTERS:
        raise RefusedError(Refusal.MALFORMED)
    if authorization is None:
        return text.strip()
    scheme, _, shown = authorization.partition(" ")
    if scheme.lower() != "bearer" or not shown.strip():
        raise RefusedError(Refusal.MALFORMED)
    return shown.strip()
