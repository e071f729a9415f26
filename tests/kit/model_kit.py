"""Models of every kind that are loaded in a second, in folders as a consumer finds them."""

from pathlib import Path

from transformers import AutoTokenizer

from fairlane.outcomes import Task
from fairlane.records import ModelVersion
from tests.kit.encoder_kit import prepared_tokenizer, save_cross_encoder, save_encoder
from tests.kit.engine_kit import MODELS_DIR, save_parrot

CONTEXT_TOKENS = 64
ANSWER = " alpha beta gamma delta epsilon zeta eta theta iota kappa"
"""What ``words`` says to everything, before it ends."""
DIGITS = "digits"


def save_models(models_dir: Path) -> None:
    """One folder for each of ``real_models``."""
    texts = prepared_tokenizer()
    words = AutoTokenizer.from_pretrained(MODELS_DIR / "smollm2-135m-instruct", local_files_only=True)
    save_parrot(models_dir / "words", words, {"": words(ANSWER).input_ids})
    save_encoder(models_dir / "vectors", texts)
    save_cross_encoder(models_dir / "pairs", texts)
    (models_dir / DIGITS).symlink_to(MODELS_DIR / DIGITS)


def real_models(unique: str, pool: str) -> tuple[ModelVersion, ...]:
    """One for every task, all of one pool, each by its torch engine."""

    def model(name: str, engine: str, task: str, max_context_tokens: int, max_output_tokens: int) -> ModelVersion:
        return ModelVersion(
            model=f"{unique}-{name}",
            version="1",
            pool=pool,
            engine=engine,
            tasks=(str(task),),
            path=name,
            max_context_tokens=max_context_tokens,
            max_output_tokens=max_output_tokens,
        )

    return (
        model("words", "torch-causal-lm", Task.GENERATE, CONTEXT_TOKENS, 32),
        model("vectors", "torch-embedding", Task.EMBED, CONTEXT_TOKENS, 0),
        model("pairs", "torch-cross-encoder", Task.RANK, CONTEXT_TOKENS, 0),
        model(DIGITS, "torch-classifier", Task.CLASSIFY, 1, 0),
    )
