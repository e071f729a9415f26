"""What a caller is told when something is refused or fails; routes turn it into OpenAI's shape or Fairlane's own."""

from fairlane.outcomes import Code

UNAVAILABLE = "unavailable"
"""The gateway's own code: Kafka or Postgres is away, so that nothing was accepted, or nothing can be looked up, now."""


class GatewayError(Exception):
    """An answer that is not a success. Its texts are for the caller and quote no input.

    Attributes:
        status: of HTTP.
        code: one word that programs compare: a code of ``fairlane.outcomes.Code``, or one of the gateway's own.
        message: one sentence.
        field: the field at fault, if one is.
        retry_after_ms: when trying again makes sense.
        request_id: of the request it is about, if there is one; the caller can ask for its result.
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
