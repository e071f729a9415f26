"""The file of remote endpoints: what it means, and what is refused with line, field and reason."""

import re
import textwrap
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from fairlane.records import ModelVersion
from fairlane.settings import Settings
from fairlane_server.artifacts.store import artifact_store
from fairlane_server.models.models_file import load_models
from fairlane_server.yaml_config import ConfigError
from inference_consumers.engine_process.host import engine_host, settings_below
from inference_consumers.engines.protocol import EngineSpec
from inference_consumers.engines.remote.endpoints import BalancingPolicy, ModelEndpoint, endpoints_of
from inference_consumers.engines.remote.endpoints_file import load_endpoints

WHOLE = """\
models:
  - model: llama
    version: "2"
    policy: weighted_round_robin
    max_concurrent: 8
    ca_file: ca.pem
    connect_timeout_s: 1
    idle_timeout_s: 30
    total_timeout_s: 300
    wait_s: 5
    health_interval_s: 2.5
    max_rows: 16
    tensors: {pixels: input_0}
    endpoints:
      - {url: "https://gpu-1.example:8443/llama/", weight: 3, served_name: meta/llama, api_key_file: /run/key}
      - {url: "http://10.0.0.2", max_concurrent: 4, served_version: "7"}
  - model: llama
    endpoints: [{url: "http://[::1]:8000"}]
"""


def written(folder: Path, text: str) -> Path:
    file = folder / "endpoints.yaml"
    file.write_text(text)
    return file


def test_everything_that_can_be_said(tmp_path: Path) -> None:
    entries = load_endpoints(written(tmp_path, WHOLE))
    [own, rest] = entries
    assert own.endpoints == (
        ModelEndpoint(
            "https://gpu-1.example:8443/llama",
            3,
            8,
            "meta/llama",
            api_key_file="/run/key",
            ca_file=str(tmp_path / "ca.pem"),
        ),
        ModelEndpoint("http://10.0.0.2", 1, 4, served_version="7", ca_file=str(tmp_path / "ca.pem")),
    )
    assert [one.label for one in (*own.endpoints, *rest.endpoints)] == ["gpu-1.example:8443", "10.0.0.2:80", "::1:8000"]
    assert (own.policy, own.total_timeout_s, own.max_rows) == (BalancingPolicy.WEIGHTED_ROUND_ROBIN, 300, 16)
    assert own.tensors == {"pixels": "input_0"}
    assert (rest.policy, rest.endpoints[0].max_concurrent) == (BalancingPolicy.LEAST_OUTSTANDING, 32)
    assert endpoints_of(entries, "llama", "2") is own
    assert endpoints_of(entries, "llama", "1") is rest
    assert endpoints_of(entries, "other", "1") is None


@pytest.mark.parametrize(
    ("endpoint", "message"),
    [
        ('url: "ftp://a"', r"url: must be a URL that begins with http:// or https://"),
        ("url: 7", r"url: must be a URL"),
        ('url: "http://"', r"url: must be a URL"),
        ('url: "http://:80"', r"url: must be a host"),
        ('url: "http://user:secret@a"', r"url: must have no user and no password"),
        ('url: "http://a?key=secret"', r"url: must be a host with a port and perhaps a path, without \? and #"),
        ('url: "http://a:99999"', r"url: is no valid URL"),
        ('url: "http://a/v1"', r"url: must not end with /v1 or /v2, which is appended"),
        ('url: "http://a", weight: 0', r"weight: must be from 1 to 1000, not 0"),
        ('url: "http://a", max_concurrent: 0', r"max_concurrent: must be from 1 to 4096, not 0"),
        ('url: "http://a", api_key: secret', r"api_key: unknown key; known here: api_key_file, "),
    ],
)
def test_a_wrong_endpoint_is_named_and_not_quoted(tmp_path: Path, endpoint: str, message: str) -> None:
    file = written(tmp_path, f"models:\n  - model: m\n    endpoints:\n      - {{{endpoint}}}\n")
    with pytest.raises(ConfigError, match=rf"{file}:4: models\[0\]\.endpoints\[0\]\.{message}") as caught:
        load_endpoints(file)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("endpoints: []", "must have from 1 to 64 endpoints, not 0"),
        ('endpoints: [{url: "http://a"}, {url: "http://a:80/b"}]', "a:80 appears twice"),
        ('endpoints: [{url: "http://a"}], policy: random', "unknown policy 'random'; known: least_outstanding, weigh"),
        ('endpoints: [{url: "http://a"}], wait_s: -1', "wait_s: must be from 0.0 to 600.0"),
        ('endpoints: [{url: "http://a"}], tensors: {image: x}', "unknown key; known here: document, embedding"),
        ("version: x", "missing: endpoints"),
    ],
)
def test_a_wrong_entry_is_named(tmp_path: Path, entry: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_endpoints(written(tmp_path, f"models: [{{model: m, {entry}}}]"))


def test_an_entry_that_is_there_twice_is_named(tmp_path: Path) -> None:
    text = WHOLE + '  - model: llama\n    endpoints: [{url: "http://b"}]\n'
    with pytest.raises(ConfigError, match="'llama' has an entry for all versions already, on line 17"):
        load_endpoints(written(tmp_path, text))


def test_the_spec_of_an_engine_has_the_endpoints_of_its_version_and_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(endpoints_file=written(tmp_path, WHOLE))
    models = [ModelVersion("llama", version, "p", "openai-endpoint", ("generate",), "x", 8, 8) for version in "12"]
    models.append(ModelVersion("other", "1", "p", "simulated", ("generate",), "x", 8, 8))
    artifacts = artifact_store(settings)
    hosts = [engine_host(settings, artifacts, model) for model in models]
    entries = load_endpoints(tmp_path / "endpoints.yaml")
    assert [host.spec.endpoints for host in hosts] == [entries[1], entries[0], None]
    encoded = msgspec.msgpack.encode(hosts[1].spec)
    assert msgspec.msgpack.decode(encoded, type=EngineSpec) == hosts[1].spec


PAGE = Path(__file__).parents[3] / "docs/remote-endpoints.md"


def test_the_documented_settings_let_the_documented_version_use_its_servers(tmp_path: Path) -> None:
    blocks = re.findall(r"(?:^ {8}.*\n|^\n(?= {8}))+", PAGE.read_text(), re.MULTILINE)
    version, endpoints, stated = (textwrap.dedent(block).strip() for block in blocks[:3])
    (tmp_path / "models.yaml").write_text("models:\n" + textwrap.indent(version, "  "))
    (tmp_path / "endpoints.yaml").write_text(endpoints)
    (model,) = load_models(tmp_path / "models.yaml")
    (entry,) = load_endpoints(tmp_path / "endpoints.yaml")
    assert settings_below(Settings(), model) == ["MAX_BATCH_SIZE", "MAX_BATCH_TOKENS"]
    values = {name.lower(): int(value) for name, _, value in (one.partition("=") for one in stated.split())}
    settings = Settings(**values, endpoints_file=tmp_path / "endpoints.yaml")  # type: ignore[arg-type]
    assert settings_below(settings, model) == []
    assert settings.max_batch_size == model.max_batch_size == sum(one.max_concurrent for one in entry.endpoints)


def test_a_consumer_whose_settings_cut_a_remote_version_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "endpoints.yaml").write_text("models: [{model: llama, endpoints: [{url: 'http://h:1'}]}]")
    settings = Settings(endpoints_file=tmp_path / "endpoints.yaml", max_batch_tokens=100)
    model = ModelVersion("llama", "2", "p", "openai-endpoint", ("generate",), "x", 8, 8, 4, 8_192)
    for one in (model, replace(model, model="local", engine="simulated")):
        engine_host(settings, artifact_store(settings), one)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "remote_version_cut" in line]
    assert "MAX_BATCH_TOKENS" in line
    assert "MAX_BATCH_SIZE" not in line
