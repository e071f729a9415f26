"""models.yaml: what is accepted, and that every mistake is reported with its file and line."""

import re
from pathlib import Path

import pytest

from fairlane.records import ModelMetric
from fairlane_server.models.models_file import load_models, read_models
from fairlane_server.yaml_config import ConfigError, load_yaml_with_lines

PROJECT = Path(__file__).parents[3]

GOOD = """\
models:
  - model: small
    version: "1"
    pool: generate
    engine: torch-causal-lm
    tasks: [generate]
    path: small
    limits:
      max_context_tokens: 2048
      max_output_tokens: 512
  - model: other
    version: "2"
    pool: encode
    engine: torch-embedding
    tasks: [embed, rank]
    path: nested/other
    limits: {max_context_tokens: 256, max_output_tokens: 0, max_batch_size: 8, max_batch_tokens: 1024}
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "models.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_shipped_file_names_five_models_in_two_pools() -> None:
    models = {model.model: model for model in load_models(PROJECT / "deploy/models.yaml")}
    assert {name: (model.pool, model.engine, model.tasks) for name, model in models.items()} == {
        "smollm2-135m-instruct": ("generate", "torch-causal-lm", ("generate",)),
        "smollm2-135m-instruct-int8": ("generate", "torch-causal-lm", ("generate",)),
        "all-minilm-l6-v2": ("encode", "torch-embedding", ("embed", "rank")),
        "all-minilm-l6-v2-static": ("encode", "static-ranking", ("rank",)),
        "digits": ("encode", "torch-classifier", ("classify",)),
    }
    assert all(model.max_batch_size == 32 for model in models.values())


def test_limits_are_read_and_default(tmp_path: Path) -> None:
    first, second = load_models(write(tmp_path, GOOD))
    assert (first.max_context_tokens, first.max_output_tokens) == (2048, 512)
    assert (first.max_batch_size, first.max_batch_tokens) == (32, 16_384)
    assert (second.max_batch_size, second.max_batch_tokens) == (8, 1024)
    assert second.path == "nested/other"
    assert (second.dedicated_pools, second.smaller_model) == ((), None)


def test_dedicated_pools_and_the_smaller_model_are_read(tmp_path: Path) -> None:
    text = GOOD.replace(
        "tasks: [generate]", "tasks: [embed]\n    smaller_model: other\n    dedicated_pools: [own, acme-gpu]"
    )
    first, _ = load_models(write(tmp_path, text))
    assert (first.dedicated_pools, first.smaller_model) == (("own", "acme-gpu"), "other")


def test_data_type_quantization_and_devices_are_read_and_default(tmp_path: Path) -> None:
    more = "dtype: bfloat16\n    quantization: int8\n    tensor_parallel_size: 2"
    first, second = load_models(write(tmp_path, GOOD.replace("path: small\n", f"path: small\n    {more}\n")))
    assert (first.dtype, first.quantization, first.tensor_parallel_size) == ("bfloat16", "int8", 2)
    assert (second.dtype, second.quantization, second.tensor_parallel_size) == (None, None, 1)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("smaller_model: none", r"models\[0\]\.smaller_model: unknown model 'none'; known here: small, other"),
        ("smaller_model: other", "'other' serves none of generate"),
        ("smaller_model: small", "go round in a circle: small -> small"),
        ("smaller_model: 5", "must be a string, not 5"),
        ("dedicated_pools: [generate]", "'generate' is the model's shared pool"),
        ("dedicated_pools: [own.gpu]", "'own.gpu' does not match"),
        ("dedicated_pools: own", "must be a list"),
        ("dedicated_pools: [own, own]", "'own' appears twice"),
        ("dtype: int8", r"models\[0\]\.dtype: unknown data type 'int8'; known: float32, bfloat16, float16"),
        ("dtype: 16", "dtype: must be a string, not 16"),
        ("quantization: INT8", "quantization: 'INT8' does not match"),
        ("quantization: 8", "quantization: must be a string, not 8"),
        ("tensor_parallel_size: 0", "tensor_parallel_size: must be at least 1, not 0"),
        ("tensor_parallel_size: two", "tensor_parallel_size: must be a whole number, not 'two'"),
    ],
)
def test_a_mistake_in_what_is_optional_names_its_line(tmp_path: Path, more: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_models(write(tmp_path, GOOD.replace("  - model: small\n", f"  - model: small\n    {more}\n")))
    assert caught.value.line == 3


def test_models_that_are_one_anothers_smaller_model_are_refused(tmp_path: Path) -> None:
    text = GOOD.replace("tasks: [generate]", "tasks: [embed, rank]\n    smaller_model: other").replace(
        "path: nested/other", "path: nested/other\n    smaller_model: small"
    )
    with pytest.raises(ConfigError, match="go round in a circle: small -> other -> small") as caught:
        load_models(write(tmp_path, text))
    assert caught.value.line == 7


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ("    pool: generate\n", "", 2, r"models\[0\]: missing: pool"),
        ("    path: small\n", "    path: small\n    pth: x\n", 8, r"models\[0\]\.pth: unknown key"),
        ("max_output_tokens: 512", "max_output: 512", 10, "limits.max_output: unknown key"),
        ("model: other", "model: small", 2, "one of the versions of 'small' must have the alias champion"),
        (
            'model: other\n    version: "2"',
            'model: small\n    version: "1"',
            12,
            "'1' of 'small' is already defined on line 2",
        ),
        ("model: small", "model: Small Model", 2, "'Small Model' does not match"),
        ("pool: generate", "pool: gpu.pool", 4, "'gpu.pool' does not match"),
        ('version: "1"', "version: 1", 3, "must be a string, not 1"),
        ("tasks: [generate]", "tasks: [generate, sing]", 6, "unknown task 'sing'; known: generate, embed"),
        ("tasks: [generate]", "tasks: []", 6, "at least one task"),
        ("tasks: [embed, rank]", "tasks: [embed, embed]", 15, "'embed' appears twice"),
        ("path: nested/other", "path: ../other", 16, "inside the models folder"),
        ("path: nested/other", "path: /other", 16, "inside the models folder"),
        ("max_context_tokens: 2048", "max_context_tokens: 0", 9, "must be at least 1, not 0"),
        ("max_context_tokens: 2048", "max_context_tokens: many", 9, "must be a whole number, not 'many'"),
        ("max_context_tokens: 2048", "max_context_tokens: true", 9, "must be a whole number, not True"),
        ("    engine: torch-causal-lm\n", "    pool: twice\n", 5, "pool: duplicate key, first on line 4"),
    ],
)
def test_a_mistake_names_file_line_and_key(tmp_path: Path, old: str, new: str, line: int, message: str) -> None:
    assert old in GOOD
    path = write(tmp_path, GOOD.replace(old, new))
    with pytest.raises(ConfigError) as caught:
        load_models(path)
    assert caught.value.file == path
    assert caught.value.line == line
    assert str(caught.value).startswith(f"{path}:{line}: ")
    assert re.search(message, caught.value.message)


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("", 1, "is empty"),
        ("models: []\n", 1, "at least one model"),
        ("models: nothing\n", 1, "models: must be a list"),
        ("- model\n", 1, "must be a mapping"),
        ("models:\n  - just-a-name\n", 2, r"models\[0\]: must be a mapping"),
        ("models: [\n", 2, "not YAML"),
        ("models: &a\n  - *a\n", 1, "contains it"),
        ("models: 1\n2: x\n", 2, "a key must be a string"),
        ("a: 1\n---\nb: 2\n", 2, "not YAML"),
        ("models: !!python/object:os.system {}\n", None, "must be a list"),
    ],
)
def test_a_file_of_another_shape_is_refused(tmp_path: Path, text: str, line: int | None, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_models(path)
    if line is not None:
        assert caught.value.line == line


def test_an_unreadable_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read") as missing:
        load_models(tmp_path / "none.yaml")
    assert missing.value.line is None
    path = tmp_path / "latin.yaml"
    path.write_bytes(b"models: \xff\n")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_models(path)


def test_nodes_give_values_and_the_lines_of_their_keys(tmp_path: Path) -> None:
    path = write(tmp_path, "a:\n  b:\n    - 1\n    - c: x\n  d: 2.5\n")
    root = load_yaml_with_lines(path)
    assert root.value == {"a": {"b": [1, {"c": "x"}], "d": 2.5}}
    inside = root.fields["a"].fields
    assert (inside["b"].line, inside["b"].items[1].fields["c"].line) == (2, 4)
    number = inside["d"]
    assert number.number(2, 3) == 2.5
    with pytest.raises(ConfigError, match=r"a\.d: must be from 3 to 4, not 2\.5"):
        number.number(3, 4)


def test_of_several_versions_one_is_the_champion(tmp_path: Path) -> None:
    two = GOOD.replace("model: other", "model: small\n    aliases: [champion, tried]")
    file = read_models(write(tmp_path, two))
    assert [(model.model, model.version) for model in file.versions] == [("small", "1"), ("small", "2")]
    assert file.aliases == {"small": {"champion": "2", "tried": "2"}}
    assert read_models(write(tmp_path, GOOD)).aliases == {"small": {"champion": "1"}, "other": {"champion": "2"}}
    both = two.replace('version: "1"', 'version: "1"\n    aliases: [champion]')
    with pytest.raises(ConfigError, match="'champion' is also an alias of version '1'"):
        read_models(write(tmp_path, both))


def test_what_a_version_was_registered_with_is_read(tmp_path: Path) -> None:
    more = "source: models:/small/1\n    metrics: {accuracy: 0.5, loss: 2}\n    requirements: [torch==2.9.0]"
    first, second = load_models(write(tmp_path, GOOD.replace("path: small\n", f"path: small\n    {more}\n")))
    assert (first.source, first.requirements) == ("models:/small/1", ("torch==2.9.0",))
    assert first.metrics == (ModelMetric("accuracy", 0.5), ModelMetric("loss", 2.0))
    assert (second.source, second.metrics, second.requirements) == (None, (), ())


def test_a_digest_is_read_with_its_source_only(tmp_path: Path) -> None:
    digest = f"artifact_digest: sha256:{'a' * 64}"
    text = GOOD.replace("path: small\n", f"path: small\n    source: s3://models/small\n    {digest}\n")
    assert load_models(write(tmp_path, text))[0].artifact_digest == f"sha256:{'a' * 64}"
    for wrong, reason in (
        (text.replace("    source: s3://models/small\n", ""), "artifact_digest: needs `source`"),
        (text.replace("sha256:", "md5:"), "does not match"),
    ):
        with pytest.raises(ConfigError, match=reason):
            load_models(write(tmp_path, wrong))
