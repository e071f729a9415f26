"""The checks by name. Libraries and weights are loaded by ``load_checks`` alone."""

import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TypeVar

from fairlane.outcomes import GuardrailCheck
from inference_consumers.guardrails.check import Check, CheckUnavailableError, Processor, QuestionSize

SPACY_MODEL, ENCODER, INJECTION_HEAD, TOXICITY_MODEL = (
    "en-core-web-sm",
    "all-minilm-l6-v2",
    "prompt-injection",
    "toxicity",
)
"""Folders of the models folder."""

LoadedT = TypeVar("LoadedT")
WHOLE_TEXTS = QuestionSize()
QUESTION_SIZES: Mapping[str, QuestionSize] = {
    # An e-mail address has at most 254 characters (RFC 5321, section 4.5.3).
    "pii": QuestionSize(characters=16_384, overlap=300),
    # A window of 64 tokens has some 300 characters.
    "prompt_injection": QuestionSize(characters=4_096, overlap=400),
    # The time of a repair adds up, and one that is late must not take its neighbours along.
    "post_processing": QuestionSize(texts=1),
}
"""Of the checks that judge each part of a text by itself, and of post-processing; the others have WHOLE_TEXTS. At most
half a second (pii) and one (prompt_injection) of a processor that does nothing else."""


def load_checks(names: Collection[str], models_dir: Path) -> dict[str, Check]:
    """Checks by name, ready to run; takes seconds for those with a model.

    Raises:
        CheckUnavailableError: a check does not exist, or its package or weights are missing.
    """
    # As for engines (``engines.registry``): threads should not spin on cores that other processes use as well.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    checks: dict[str, Check] = {}
    for name in names:
        if name not in _LOADERS:
            raise CheckUnavailableError(name, f"there is none of this name; known: {', '.join(NAMES)}")
        checks[name] = _loaded(name, _LOADERS[name], models_dir)
    return checks


def load_one(name: str, models_dir: Path) -> Check | Processor:
    """What the process of this name runs: a check, or the post-processor. Raises as ``load_checks``."""
    if name == GuardrailCheck.POST_PROCESSING:
        return _loaded(name, _post_processor, models_dir)
    return load_checks((name,), models_dir)[name]


def _loaded(name: str, load: Callable[[Path], LoadedT], models_dir: Path) -> LoadedT:
    try:
        return load(models_dir)
    except (ImportError, OSError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}; `make install` installs and prepares what it needs"
        raise CheckUnavailableError(name, reason) from error


def _folder(models_dir: Path, name: str) -> Path:
    """Before libraries are imported, which takes seconds."""
    if not (models_dir / name).is_dir():
        raise FileNotFoundError(f"there is no folder {models_dir / name}")
    return models_dir / name


def _pii(models_dir: Path) -> Check:
    folder = _folder(models_dir, SPACY_MODEL)
    from inference_consumers.guardrails.pii import PiiCheck

    return PiiCheck(folder)


def _secrets(_: Path) -> Check:
    from inference_consumers.guardrails.secrets import SecretsCheck

    return SecretsCheck()


def _patterns(_: Path) -> Check:
    from inference_consumers.guardrails.patterns import PatternsCheck

    return PatternsCheck()


def _prompt_injection(models_dir: Path) -> Check:
    encoder, folder = _folder(models_dir, ENCODER), _folder(models_dir, INJECTION_HEAD)
    from inference_consumers.engines.window_encoder import WindowEncoder
    from inference_consumers.guardrails.prompt_injection import InjectionHead, PromptInjectionCheck

    head = InjectionHead.load(folder)
    return PromptInjectionCheck(WindowEncoder(encoder, head.size), head)


def _toxicity(models_dir: Path) -> Check:
    folder = _folder(models_dir, TOXICITY_MODEL)
    from inference_consumers.guardrails.toxicity import ToxicityCheck, ToxicityModel

    return ToxicityCheck(ToxicityModel(folder))


def _leaked_prompt(_: Path) -> Check:
    from inference_consumers.guardrails.leaked_prompt import LeakedPromptCheck

    return LeakedPromptCheck()


def _repetition(_: Path) -> Check:
    from inference_consumers.guardrails.repetition import RepetitionCheck

    return RepetitionCheck()


def _post_processor(_: Path) -> Processor:
    from inference_consumers.guardrails.post_processing import PostProcessor

    return PostProcessor()


_LOADERS: dict[str, Callable[[Path], Check]] = {
    "pii": _pii,
    "secrets": _secrets,
    "patterns": _patterns,
    "prompt_injection": _prompt_injection,
    "toxicity": _toxicity,
    "leaked_prompt": _leaked_prompt,
    "repetition": _repetition,
}
NAMES = tuple(_LOADERS)
