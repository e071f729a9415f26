"""Guardrails on the wire: the policy of a tenant, and what its checks decided."""

from fairlane.frozen import frozen_dataclass


@frozen_dataclass(frozen=True, slots=True)
class GuardrailRule:
    """One check and its consequence. ``action`` is off, log, redact or block; ``on_failure`` says whether a request
    goes on (open) or is refused (closed) when the check cannot be carried out."""

    check: str
    action: str
    on_failure: str


@frozen_dataclass(frozen=True, slots=True)
class PostProcessing:
    """Changes of an answer after its checks, in the order of the fields. ``json_schema`` is a JSON Schema as text: an
    answer that does not satisfy it is repaired, or withheld. ``on_failure`` as in a rule."""

    deduplicate: bool = False
    trim: bool = False
    json_schema: str | None = None
    on_failure: str = "closed"


@frozen_dataclass(frozen=True, slots=True)
class GuardrailPolicy:
    """Checks of a tenant's requests, in order: of the input before the model sees it, and of the output. ``patterns``
    are regular expressions of RE2; they and ``denied_words`` are what the check ``patterns`` looks for. Answers go as
    they are without ``post_processing``."""

    input: tuple[GuardrailRule, ...] = ()
    output: tuple[GuardrailRule, ...] = ()
    patterns: tuple[str, ...] = ()
    denied_words: tuple[str, ...] = ()
    post_processing: PostProcessing | None = None


@frozen_dataclass(frozen=True, slots=True)
class GuardrailVerdict:
    """Result of one check of one request: ``stage`` is input or output, ``types`` names what was found. Never holds the
    text."""

    stage: str
    check: str
    verdict: str
    types: tuple[str, ...] = ()

    def __str__(self) -> str:
        """As in messages and audit events: ``input secrets blocked (aws_access_key)``."""
        found = f" ({', '.join(self.types)})" if self.types else ""
        return f"{self.stage} {self.check} {self.verdict}{found}"
