"""Check ``pii``: personal data in English texts, with Presidio and a small spaCy model for names.

Each recognizer is chosen here; none is loaded from Presidio's defaults. As shipped, the one of e-mail addresses fetches
the list of public suffixes from the network, and Presidio's debug log has words of the text.
"""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import spacy
import tldextract
from presidio_analyzer import AnalyzerEngine, EntityRecognizer, RecognizerRegistry
from presidio_analyzer.nlp_engine import NerModelConfiguration, SpacyNlpEngine
from presidio_analyzer.predefined_recognizers import (
    CreditCardRecognizer,
    EmailRecognizer,
    IbanRecognizer,
    IpRecognizer,
    PhoneRecognizer,
    SpacyRecognizer,
    UsSsnRecognizer,
)
from spacy.language import Language
from spacy.tokens import Doc

from inference_consumers.guardrails.check import CheckContext, Finding
from inference_consumers.guardrails.normalization import normalized
from inference_consumers.guardrails.spans import joined, pieces, shifted

PERSON, PHONE = "PERSON", "PHONE_NUMBER"
TYPES = (PERSON, PHONE, "EMAIL_ADDRESS", "CREDIT_CARD", "IBAN_CODE", "US_SSN", "IP_ADDRESS")
LEAST_SCORE = 0.4
"""A number in the format of a phone has 0.4, one of a social security number with its separators 0.5; a word such as
"phone" or "ssn" before a number adds 0.35. What has a checksum (cards, IBAN) has 1 or is not found."""
_LANGUAGE = "en"
_PIECE_CHARACTERS = 2_000
"""Some of Presidio's expressions take time that is quadratic in the text."""
_OVERLAP_CHARACTERS = 300
"""An e-mail address has at most 254 characters (RFC 5321, section 4.5.3)."""
_LEAST_DIGITS = 7
"""Of a phone number. The search for them costs a third of all, in texts that have any."""
_LOWERCASE_LEMMAS = "fairlane_lowercase_lemmas"
_UNUSED = ("tagger", "parser", "senter", "attribute_ruler", "lemmatizer")


class PiiCheck:
    """Raises OSError or ValueError at the start when the folder does not hold the spaCy model."""

    name = "pii"

    def __init__(self, model: Path) -> None:
        logging.getLogger("presidio-analyzer").disabled = True
        self._engine = _Engine(model)
        self._engine.load()
        self._analyzer = AnalyzerEngine(
            registry=RecognizerRegistry(recognizers=_recognizers(), supported_languages=[_LANGUAGE]),
            nlp_engine=self._engine,
            supported_languages=[_LANGUAGE],
            default_score_threshold=LEAST_SCORE,
        )

    def find(self, texts: Sequence[str], context: CheckContext) -> list[list[Finding]]:  # noqa: ARG002 - of the protocol
        """Raises RuntimeError, without any of the text in it, when a library fails."""
        try:
            return [self._find(text) for text in texts]
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - the messages of Presidio quote the text
            raise RuntimeError(f"Presidio failed: {type(error).__name__}") from None

    def _find(self, text: str) -> list[Finding]:
        plain = normalized(text)
        found: list[Finding] = []
        for start, piece in pieces(plain.text, _PIECE_CHARACTERS, _OVERLAP_CHARACTERS):
            found += (shifted(one, start) for one in self._in_piece(piece))
        return joined(plain.original(one) for one in found if not _is_part_of_surer(one, found))

    def _in_piece(self, piece: str) -> Iterator[Finding]:
        if not piece.strip():
            return
        wanted = [kind for kind in TYPES if kind != PHONE or sum(map(str.isdigit, piece)) >= _LEAST_DIGITS]
        # Without it spaCy keeps every word that it ever saw.
        with self._engine.get_nlp(_LANGUAGE).memory_zone():
            for one in self._analyzer.analyze(piece, _LANGUAGE, entities=wanted):
                yield Finding(one.entity_type, one.start, one.end, round(min(1.0, one.score), 3))


def _is_part_of_surer(one: Finding, findings: Sequence[Finding]) -> bool:
    """Whether another finding says more of these digits: a card's number is in the format of a phone's, too."""
    return one.type == PHONE and any(
        other.score > one.score and other.start < one.end and one.start < other.end for other in findings
    )


class _Engine(SpacyNlpEngine):
    """Names alone, on the CPU: the GPU is the engine's. Context words are compared in lower case, not by their lemmas,
    which saves a third of the time."""

    def __init__(self, model: Path) -> None:
        super().__init__(
            models=[{"lang_code": _LANGUAGE, "model_name": str(model)}],
            ner_model_configuration=NerModelConfiguration(model_to_presidio_entity_mapping={PERSON: PERSON}),
        )
        self._folder = model

    def load(self) -> None:
        language = spacy.load(self._folder, exclude=list(_UNUSED))
        labels = language.pipe_labels["ner"]
        self.ner_model_configuration.labels_to_ignore = [label for label in labels if label != PERSON]
        language.add_pipe(_LOWERCASE_LEMMAS)
        self.nlp = {_LANGUAGE: language}  # type: ignore[assignment] # it begins as None, without a type


@Language.component(_LOWERCASE_LEMMAS)
def _lowercase_lemmas(document: Doc) -> Doc:
    for token in document:
        token.lemma_ = token.lower_
    return document


class _EmailRecognizer(EmailRecognizer):
    """Knows the public suffixes of its package, and fetches none."""

    _suffixes = tldextract.TLDExtract(suffix_list_urls=(), cache_dir=None)

    def validate_result(self, pattern_text: str) -> bool:
        return bool(self._suffixes(pattern_text).top_domain_under_public_suffix)


def _recognizers() -> list[EntityRecognizer]:
    return [
        SpacyRecognizer(supported_entities=[PERSON]),
        PhoneRecognizer(),
        _EmailRecognizer(),
        CreditCardRecognizer(),
        IbanRecognizer(),
        UsSsnRecognizer(),
        IpRecognizer(),
    ]
