"""Remote endpoints of a deployment, read from the file that ENDPOINTS_FILE names."""

import re
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fairlane.names import MODEL_PATTERN
from fairlane_server.models.routes import VERSION_PATTERN
from fairlane_server.yaml_config import Reader, YamlNode, load_yaml_with_lines
from inference_consumers.engines.remote.endpoints import ANY_VERSION, BalancingPolicy, ModelEndpoint, ModelEndpoints

TENSORS = ("pixels", "logits", "probabilities", "text", "embedding", "query", "document", "score")
"""Our names of the tensors of the Open Inference Protocol."""

_MOST_ENDPOINTS = 64
_URL = re.compile(r"https?://[!-~]{1,2000}", re.ASCII)
_TENSOR = re.compile(r"[!-~]{1,200}", re.ASCII)
_VERSION_PATH = re.compile(r"/v[12]/?$")


def load_endpoints(path: Path) -> tuple[ModelEndpoints, ...]:
    """Read the file. Raises ConfigError with file, line, field and reason: unknown or missing keys, values out of
    bounds, a URL with a user or a query, a version or an endpoint given twice."""
    root = load_yaml_with_lines(path).mapping({"models"})["models"]
    found: dict[tuple[str, str], tuple[YamlNode, ModelEndpoints]] = {}
    for node in root.sequence():
        entry = _entry(node)
        key = entry.model, entry.version
        if key in found:
            raise node.fields["model"].error(
                f"{entry.model!r} has an entry for {'this version' if entry.version else 'all versions'} already, "
                f"on line {found[key][0].line}"
            )
        found[key] = node, entry
    return tuple(entry for _, entry in found.values())


def _entry(node: YamlNode) -> ModelEndpoints:
    given = node.read(_REQUIRED, _OPTIONAL)
    defaults: dict[str, Any] = {name: given.pop(name) for name in ("max_concurrent", "ca_file") if name in given}
    endpoints = tuple(_endpoint(item, defaults) for item in given.pop("endpoints"))
    for number, endpoint in enumerate(endpoints):
        if endpoint.label in [other.label for other in endpoints[:number]]:
            raise node.fields["endpoints"].items[number].error(f"{endpoint.label} appears twice")
    return ModelEndpoints(version=given.pop("version", ANY_VERSION), endpoints=endpoints, **given)


def _endpoints(node: YamlNode) -> tuple[YamlNode, ...]:
    items = node.sequence()
    if not 1 <= len(items) <= _MOST_ENDPOINTS:
        raise node.error(f"must have from 1 to {_MOST_ENDPOINTS} endpoints, not {len(items)}")
    return items


def _endpoint(node: YamlNode, defaults: dict[str, Any]) -> ModelEndpoint:
    return ModelEndpoint(**(defaults | node.read({"url": _url}, _ENDPOINT_OPTIONAL)))


def _url(node: YamlNode) -> str:
    """Errors do not quote the value: a URL may hold a password by mistake."""
    value = node.value
    if not isinstance(value, str) or _URL.fullmatch(value) is None:
        raise node.error("must be a URL that begins with http:// or https://")
    try:
        parts = urlsplit(value)
        _ = parts.port
    except ValueError:
        raise node.error("is no valid URL") from None
    if "@" in parts.netloc:
        raise node.error("must have no user and no password; name the file of a key in api_key_file")
    if not parts.hostname or parts.query or parts.fragment or "?" in value or "#" in value:
        raise node.error("must be a host with a port and perhaps a path, without ? and #")
    if _VERSION_PATH.search(parts.path):
        raise node.error("must not end with /v1 or /v2, which is appended")
    return value.rstrip("/")


def _file(node: YamlNode) -> str:
    """A path; a relative one is relative to the folder of the file that names it."""
    return str((node.file.parent / node.string()).absolute())


def _tensors(node: YamlNode) -> dict[str, str]:
    return {name: inner.string(_TENSOR) for name, inner in node.mapping(frozenset(), frozenset(TENSORS)).items()}


_concurrent = partial(YamlNode.integer, minimum=1, maximum=4_096)
_short_s = partial(YamlNode.number, minimum=0.1, maximum=60.0)
_long_s = partial(YamlNode.number, minimum=0.1, maximum=3_600.0)
_REQUIRED: dict[str, Reader] = {
    "model": partial(YamlNode.string, pattern=MODEL_PATTERN),
    "endpoints": _endpoints,
}
_OPTIONAL: dict[str, Reader] = {
    "version": partial(YamlNode.string, pattern=VERSION_PATTERN),
    "policy": lambda node: BalancingPolicy(node.choice("policy", tuple(BalancingPolicy))),
    "max_concurrent": _concurrent,
    "ca_file": _file,
    "connect_timeout_s": _short_s,
    "idle_timeout_s": _long_s,
    "total_timeout_s": _long_s,
    "wait_s": partial(YamlNode.number, minimum=0.0, maximum=600.0),
    "health_interval_s": partial(YamlNode.number, minimum=0.1, maximum=300.0),
    "max_rows": partial(YamlNode.integer, minimum=1, maximum=4_096),
    "tensors": _tensors,
}
_ENDPOINT_OPTIONAL: dict[str, Reader] = {
    "weight": partial(YamlNode.integer, minimum=1, maximum=1_000),
    "max_concurrent": _concurrent,
    "served_name": YamlNode.string,
    "served_version": YamlNode.string,
    "api_key_file": _file,
    "ca_file": _file,
}
