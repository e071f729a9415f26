"""The models and tenants of a test's pipeline, and the files that say so."""

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import yaml

from fairlane.guardrail_records import GuardrailPolicy
from fairlane.outcomes import Task
from fairlane.records import ModelVersion, TenantSpec


def default_model(unique: str, pool: str) -> ModelVersion:
    """One model for every task: a consumer starts a process for each model."""
    return _simulated(unique, pool, "words", tuple(Task), 512)


def model_per_task(unique: str, pool: str) -> tuple[ModelVersion, ...]:
    """Three models of one pool: for text, for vectors and for images."""
    return (
        _simulated(unique, pool, "words", (Task.GENERATE,), 512),
        _simulated(unique, pool, "vectors", (Task.EMBED, Task.RANK), 0),
        _simulated(unique, pool, "digits", (Task.CLASSIFY,), 0),
    )


def _simulated(unique: str, pool: str, name: str, tasks: tuple[Task, ...], max_output_tokens: int) -> ModelVersion:
    return ModelVersion(
        model=f"{unique}-{name}",
        version="1",
        pool=pool,
        engine="simulated",
        tasks=tuple(map(str, tasks)),
        path=name,
        max_context_tokens=4_096,
        max_output_tokens=max_output_tokens,
    )


def write_models(path: Path, models: Iterable[ModelVersion]) -> None:
    """Write a models.yaml that ``load_models`` reads back. Of several versions of a model the first is the champion."""
    entries, seen = [], set()
    for model in models:
        champion = {} if model.model in seen else {"aliases": ["champion"]}
        entries.append({**_model_yaml(model), **champion})
        seen.add(model.model)
    path.write_text(yaml.safe_dump({"models": entries}))


def write_tenants(path: Path, tenants: Iterable[TenantSpec]) -> None:
    """Write a tenants.yaml that ``load_tenants`` reads back, without quotas and queue bounds."""
    entries = [
        {
            "tenant": spec.tenant,
            "classes": list(spec.classes),
            "models": list(spec.models),
            "services": list(spec.services),
            **({} if spec.guardrails is None else {"guardrails": _plain(spec.guardrails)}),
        }
        for spec in tenants
    ]
    path.write_text(yaml.safe_dump({"tenants": entries}))


def _plain(policy: GuardrailPolicy) -> dict[str, object]:
    rules = {stage: [asdict(rule) for rule in getattr(policy, stage)] for stage in ("input", "output")}
    return {**rules, "patterns": list(policy.patterns), "denied_words": list(policy.denied_words)}


def _model_yaml(model: ModelVersion) -> dict[str, object]:
    optional = {
        "dedicated_pools": list(model.dedicated_pools),
        "smaller_model": model.smaller_model,
        "dtype": model.dtype,
        "quantization": model.quantization,
        "tensor_parallel_size": model.tensor_parallel_size,
        "source": model.source,
        "artifact_digest": model.artifact_digest,
    }
    return {
        **{name: value for name, value in optional.items() if value},
        "model": model.model,
        "version": model.version,
        "pool": model.pool,
        "engine": model.engine,
        "tasks": list(model.tasks),
        "path": model.path,
        "limits": {
            "max_context_tokens": model.max_context_tokens,
            "max_output_tokens": model.max_output_tokens,
            "max_batch_size": model.max_batch_size,
            "max_batch_tokens": model.max_batch_tokens,
        },
    }
