"""Artifacts of MLflow's model registry, over its REST API (version 2.0): ``models:/name/3``, ``models:/name@alias``.

MLflow's own client is not used: docs/adr/0051-artifacts-and-registries-of-models.md says why.
"""

import json
import math
import re
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any
from urllib.parse import quote, urlsplit

import httpx
from pydantic import SecretStr

from fairlane.file_text import present
from fairlane.records import ModelMetric
from fairlane_server.artifacts.digest import MOST_FILES, ArtifactError, ListedFile, check_path
from fairlane_server.artifacts.registry import RegistryVersion
from fairlane_server.artifacts.source import ArtifactSource, ArtifactUnavailableError, ResolvedArtifact

_REFERENCE = re.compile(r"models:/(?P<name>[^/@:'\"\\]+)(?:/(?P<version>[1-9][0-9]{0,17})|@(?P<alias>[A-Za-z0-9_.-]+))")
_LOGGED_MODEL = re.compile(r"models:/(m-[0-9a-f]{1,64})")
_PROXIED = "mlflow-artifacts"
_TIMEOUT = httpx.Timeout(30.0, connect=5.0)
_MOST_ANSWER_BYTES = 4 << 20
_LEAST_BYTES_PER_S = 64 << 10
_PATIENCE_S = 60.0
"""For an answer, beside the time that it may take by its size."""
_MOST_FOLDERS = 1_000
_MOST_METRICS = 64
_METRIC_NAME = re.compile(r"[A-Za-z0-9_./ :-]{1,250}")
"""As MLflow allows them."""
_PAGE = 100
_MOST_PAGES = 100
_ERROR_CODE = re.compile(r"[A-Z_]{1,64}")


@dataclass(frozen=True, slots=True)
class MlflowServer:
    """Address of an MLflow server and what it is asked with: a bearer token, or a user and a password."""

    url: str
    token: SecretStr | None = None
    username: str | None = None
    password: SecretStr | None = None
    ca_file: Path | None = None

    def authorization(self) -> dict[str, str]:
        """The header of a call that is made now."""
        if self.token is not None:
            return {"Authorization": f"Bearer {present(self.token.get_secret_value())}"}
        return {}

    def basic(self) -> tuple[str, str] | None:
        if self.token is None and self.username is not None and self.password is not None:
            return self.username, present(self.password.get_secret_value())
        return None


class MlflowSource:
    """Any thread may use it. Files come from the server itself (``mlflow-artifacts:``), or from S3 if it says so."""

    def __init__(self, server: MlflowServer, s3: ArtifactSource, patience_s: float = _PATIENCE_S) -> None:
        """``patience_s`` is what an answer may take, beside its time at a least rate. Raises ArtifactError for
        certificates that cannot be used."""
        try:
            self._tls = ssl.create_default_context(cafile=None if server.ca_file is None else str(server.ca_file))
        except OSError as error:
            raise ArtifactError(f"MLFLOW_TRACKING_SERVER_CERT_PATH cannot be used: {error.strerror}") from None
        self._server = server
        self._s3 = s3
        self._patience_s = patience_s

    def resolve(self, reference: str) -> ResolvedArtifact:
        found = _REFERENCE.fullmatch(reference)
        if found is None:
            raise ArtifactError(f"{reference}: names no version; models:/NAME/VERSION and models:/NAME@ALIAS do")
        version = self._version(found["name"], found["version"], found["alias"])
        query = {"name": found["name"], "version": version["version"]}
        location = self._call("mlflow/model-versions/get-download-uri", query).get("artifact_uri")
        exact = f"models:/{found['name']}/{version['version']}"
        if not isinstance(location, str):
            raise ArtifactError(f"{exact}: the registry knows no place of its files")
        return ResolvedArtifact(exact, location, self._files(exact, location), self._metrics(version))

    def blocks(self, artifact: ResolvedArtifact, file: ListedFile) -> Iterator[bytes]:
        if artifact.location.startswith("s3://"):
            yield from self._s3.blocks(artifact, file)
            return
        path = f"{self._proxied_path(artifact.source, artifact.location)}/{file.path}"
        most_s = self._patience_s + file.size_bytes / _LEAST_BYTES_PER_S
        with self._get(f"mlflow-artifacts/artifacts/{quote(path)}", {}) as response:
            yield from _parts(response, most_s)

    def versions(self, name: str) -> list[RegistryVersion]:
        """Every version of a registered model, in the order of their numbers. Raises ArtifactError."""
        if _REFERENCE.fullmatch(f"models:/{name}/1") is None:
            raise ArtifactError(f"{name!r} cannot be the name of a registered model")
        query: dict[str, str | int] = {"filter": f"name='{name}'", "max_results": _PAGE}
        versions: list[RegistryVersion] = []
        for _ in range(_MOST_PAGES):
            answer = self._call("mlflow/model-versions/search", query)
            for found in _list(answer, "model_versions"):
                number = found.get("version")
                # The search may be by a pattern.
                if found.get("name") == name and _is_number(number):
                    versions.append(RegistryVersion(name, str(number), found.get("status", "READY") == "READY"))
            if not answer.get("next_page_token"):
                return sorted(versions, key=lambda version: int(version.version))
            query["page_token"] = str(answer["next_page_token"])
        raise ArtifactError(f"{name} has more than {_PAGE * _MOST_PAGES} versions in the registry")

    def _version(self, name: str, version: str | None, alias: str | None) -> Mapping[str, Any]:
        if version is not None:
            answer = self._call("mlflow/model-versions/get", {"name": name, "version": version})
        else:
            answer = self._call("mlflow/registered-models/alias", {"name": name, "alias": alias or ""})
        found = answer.get("model_version")
        if not isinstance(found, dict) or not _is_number(found.get("version")):
            raise ArtifactError(f"the registry's answer about {name} names no version")
        return found | {"version": str(found["version"])}

    def _files(self, exact: str, location: str) -> tuple[ListedFile, ...]:
        if location.startswith("s3://"):
            return self._s3.resolve(location).files
        root = self._proxied_path(exact, location)
        files: list[ListedFile] = []
        left, folders = [""], 0
        while left:
            folder = left.pop()
            folders += 1
            if folders > _MOST_FOLDERS:
                raise ArtifactError(f"{exact} has more than {_MOST_FOLDERS} folders")
            answer = self._call("mlflow-artifacts/artifacts", {"path": f"{root}/{folder}".rstrip("/")})
            for found in _list(answer, "files"):
                path = f"{folder}/{found.get('path')}" if folder else str(found.get("path"))
                check_path(path)
                if found.get("is_dir"):
                    left.append(path)
                else:
                    size_bytes = found.get("file_size", 0)
                    if not _is_number(size_bytes):
                        raise ArtifactError(f"{exact}: the registry says no size of {path!r}")
                    files.append(ListedFile(path, int(size_bytes)))
            if len(files) > MOST_FILES:
                raise ArtifactError(f"{exact} has more than {MOST_FILES} files")
        return tuple(sorted(files, key=lambda file: file.path.encode()))

    def _proxied_path(self, exact: str, location: str) -> str:
        """The path behind which the server serves the files. Another host would get our token, and a path of the
        server's disk is none of ours."""
        parts = urlsplit(location)
        if parts.scheme != _PROXIED or parts.netloc not in ("", urlsplit(self._server.url).netloc):
            host = parts.netloc.rpartition("@")[2]
            shown = f"{parts.scheme}://{host}" if host else f"{parts.scheme or 'a path'}"
            raise ArtifactError(
                f"{exact}: its files are at {shown!r}; only s3:// and what the tracking server serves itself "
                f"({_PROXIED}:) are read"
            )
        path = parts.path.strip("/")
        check_path(path)
        return path

    def _metrics(self, version: Mapping[str, Any]) -> tuple[ModelMetric, ...]:
        """Figures of the run that made a version, and those of its logged model in place of them. Those that are not
        finite have no record."""
        found: list[dict[str, Any]] = []
        if run_id := version.get("run_id"):
            found += self._metrics_at("mlflow/runs/get", "run", {"run_id": str(run_id)})
        if logged := _LOGGED_MODEL.fullmatch(str(version.get("source"))):
            found += self._metrics_at(f"mlflow/logged-models/{logged[1]}", "model", {})
        figures = {
            name: float(value)
            for metric in found
            if isinstance(name := metric.get("key"), str) and _METRIC_NAME.fullmatch(name)
            if isinstance(value := metric.get("value"), int | float)
        }
        finite = [name for name in sorted(figures) if math.isfinite(figures[name])]
        return tuple(ModelMetric(name, figures[name]) for name in finite[:_MOST_METRICS])

    def _metrics_at(self, path: str, of: str, query: Mapping[str, str]) -> list[dict[str, Any]]:
        try:
            answer = self._call(path, query)
        except ArtifactUnavailableError:
            raise
        except ArtifactError:
            # A run may be deleted, and a token may read models alone: a version needs no figures.
            return []
        data = answer[of].get("data") if isinstance(answer.get(of), dict) else None
        return _list(data, "metrics") if isinstance(data, dict) else []

    def _call(self, path: str, query: Mapping[str, str | int]) -> dict[str, Any]:
        with self._get(path, query) as response:
            body = bytearray()
            for block in _parts(response, self._patience_s):
                body += block
                if len(body) > _MOST_ANSWER_BYTES:
                    raise ArtifactError(f"MLflow's answer to {path} has more than {_MOST_ANSWER_BYTES} bytes")
        try:
            answer = json.loads(body)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise ArtifactError(f"MLflow's answer to {path} is no JSON object")
        return answer

    @contextmanager
    def _get(self, path: str, query: Mapping[str, str | int]) -> Iterator[httpx.Response]:
        headers = {"Accept-Encoding": "identity", **self._server.authorization()}
        url = f"{self._server.url.rstrip('/')}/api/2.0/{path}"
        try:
            # A connection for each call: nothing is left to be closed, and large files are what takes the time. No
            # proxy and no netrc of the environment: they would get, or replace, what the server is asked with.
            with (
                httpx.Client(timeout=_TIMEOUT, verify=self._tls, follow_redirects=False, trust_env=False) as client,
                client.stream("GET", url, params=query, headers=headers, auth=self._server.basic()) as response,
            ):
                _check_status(path, response)
                yield response
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ArtifactUnavailableError(f"MLflow does not answer ({type(error).__name__})") from None


def _parts(response: httpx.Response, most_s: float) -> Iterator[bytes]:
    """The body as it comes: its reader can look after each part whether to go on. Raises ArtifactUnavailableError when
    it takes longer than ``most_s``."""
    ends_at_s = monotonic() + most_s
    for part in response.iter_raw():
        yield part
        if monotonic() > ends_at_s:
            raise ArtifactUnavailableError(f"MLflow's answer did not end within {most_s:.0f} s")


def _check_status(path: str, response: httpx.Response) -> None:
    status = response.status_code
    if status == httpx.codes.OK:
        return
    if status == httpx.codes.TOO_MANY_REQUESTS or status >= httpx.codes.INTERNAL_SERVER_ERROR:
        raise ArtifactUnavailableError(f"MLflow answers {path} with HTTP {status}")
    if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        raise ArtifactError(f"MLflow refuses {path} (HTTP {status}): MLFLOW_TRACKING_TOKEN or its user may not read it")
    raise ArtifactError(f"MLflow answers {path} with HTTP {status}{_reason(response)}")


def _reason(response: httpx.Response) -> str:
    """MLflow's code of an error, which quotes nothing."""
    try:
        body = next(response.iter_raw(), b"")
        code = json.loads(body).get("error_code")
    except (ValueError, AttributeError, RecursionError, httpx.HTTPError):
        return ""
    return f": {code}" if isinstance(code, str) and _ERROR_CODE.fullmatch(code) else ""


def _list(answer: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    found = answer.get(name, [])
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def _is_number(value: object) -> bool:
    """Protobuf's JSON has 64-bit integers as strings."""
    return not isinstance(value, bool) and re.fullmatch(r"[0-9]{1,18}", str(value)) is not None
