"""The gateway's error type; routes render it in OpenAI's shape or Fairlane's own."""

from fairlane.outcomes import Code

UNAVAILABLE = "unavailable"
"""The gateway's own code: Kafka or Postgres is unavailable; nothing was accepted, or nothing can be looked up now."""


class GatewayError(Exception):
    """An HTTP error answer. Its texts are for the caller and quote no input.

    Attributes:
        status: HTTP status.
        code: one word for programs: a ``fairlane.outcomes.Code`` or a code of the gateway's own.
        message: one sentence.
        field: the invalid field, if any.
        retry_after_ms: delay after which a retry makes sense.
        request_id: the request concerned, if any; the caller can ask for its result.
    """

    def __init__(
        self,
        status: int,
        code: Code | str,
        message: str,
        *,
        field: str | None = None,
        retry_after_ms: int | None = None,
        request_id: str | None = None,
    ) -> None:
        super().__init__(status, str(code), message)
        self.status = status
        self.code = str(code)
        self.message = message
        self.field = field
        self.retry_after_ms = retry_after_ms
        self.request_id = request_id

    def __str__(self) -> str:
        return f"{self.status} {self.code}: {self.message}"
