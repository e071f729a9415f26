"""A test double of a schema registry: the endpoints that `fairlane.schema_registry` uses, in memory, over real HTTP.

It is no registry. It stores what it is given, numbers it, and answers in the real one's JSON. Of the rules of real ones
it knows "same schema, same id" and, from Apicurio, that a subject without a version has no compatibility level and can
be given none. It shows that our side asks and reacts as it should, not that a real registry would answer so.
"""

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

_NOT_FOUND = (404, {"error_code": 40403, "message": "Schema not found"})
_NO_SUBJECT = (404, {"error_code": 40401, "message": "Subject not found"})
_NO_LEVEL = (404, {"error_code": 40408, "message": "Subject does not have subject-level compatibility configured"})
_Answer = tuple[int, Any]


@dataclass(slots=True)
class RegistryDouble:
    """What the double holds. Change it from a test to make it lie.

    Attributes:
        schemas: the schema text of each id, with its type.
        subjects: ids of each subject, in the order of their versions.
        compatibility: the level of each subject that was given one.
        requests: method and path of everything that was asked.
        ignores_compatibility: it says yes to a level that is set, and keeps the one it has.
        answer_with: instead of an answer, this status and body.
        hold: no answer is given before it is set.
    """

    url: str = ""
    next_id: int = 100
    schemas: dict[int, dict[str, str]] = field(default_factory=dict)
    subjects: dict[str, list[int]] = field(default_factory=dict)
    compatibility: dict[str, str] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)
    ignores_compatibility: bool = False
    answer_with: _Answer | None = None
    hold: threading.Event | None = None

    def add(self, subject: str, text: str, schema_type: str = "AVRO") -> int:
        """Register without asking; returns the id, an existing one for the same schema."""
        entry = {"schema": text, "schemaType": schema_type}
        schema_id = next((number for number, known in self.schemas.items() if known == entry), None)
        if schema_id is None:
            schema_id, self.next_id = self.next_id, self.next_id + 1
            self.schemas[schema_id] = entry
        versions = self.subjects.setdefault(subject, [])
        if schema_id not in versions:
            versions.append(schema_id)
        return schema_id

    def answer(self, method: str, path: str, body: Any) -> _Answer:
        """Status and JSON for a request."""
        self.requests.append((method, path))
        if self.hold is not None:
            self.hold.wait(60.0)
        if self.answer_with is not None:
            return self.answer_with
        for verb, pattern, handle in self._routes():
            match = re.fullmatch(pattern, path)
            if verb == method and match is not None:
                return handle(*match.groups(), body)
        return 404, {"error_code": 404, "message": "HTTP 404 Not Found"}

    def _routes(self) -> tuple[tuple[str, str, Callable[..., _Answer]], ...]:
        return (
            ("GET", r"/schemas/ids/(\d+)", self._schema),
            ("GET", r"/subjects/([^/]+)/versions", self._versions),
            ("GET", r"/subjects/([^/]+)/versions/(\d+)", self._version),
            ("POST", r"/subjects/([^/]+)/versions", self._register),
            ("POST", r"/subjects/([^/]+)", self._look_up),
            ("GET", r"/config/([^/]+)", self._level),
            ("PUT", r"/config/([^/]+)", self._configure),
        )

    def _schema(self, schema_id: str, _body: Any) -> _Answer:
        found = self.schemas.get(int(schema_id))
        # As the real one: the type is left out for Avro.
        return _NOT_FOUND if found is None else (200, _without_avro_type(found))

    def _versions(self, subject: str, _body: Any) -> _Answer:
        ids = self.subjects.get(subject)
        return _NOT_FOUND if ids is None else (200, list(range(1, len(ids) + 1)))

    def _version(self, subject: str, version: str, _body: Any) -> _Answer:
        ids = self.subjects.get(subject, [])
        if not 0 < int(version) <= len(ids):
            return _NOT_FOUND
        schema_id = ids[int(version) - 1]
        entry = _without_avro_type(self.schemas[schema_id])
        return 200, {"subject": subject, "version": int(version), "id": schema_id, **entry}

    def _register(self, subject: str, body: Any) -> _Answer:
        return 200, {"id": self.add(subject, body["schema"], body.get("schemaType", "AVRO"))}

    def _look_up(self, subject: str, body: Any) -> _Answer:
        for version, schema_id in enumerate(self.subjects.get(subject, []), start=1):
            if self.schemas[schema_id]["schema"] == body["schema"]:
                return 200, {"subject": subject, "version": version, "id": schema_id, "schema": body["schema"]}
        return _NOT_FOUND

    def _level(self, subject: str, _body: Any) -> _Answer:
        if subject not in self.subjects:
            return _NO_SUBJECT
        level = self.compatibility.get(subject)
        return _NO_LEVEL if level is None else (200, {"compatibilityLevel": level})

    def _configure(self, subject: str, body: Any) -> _Answer:
        if subject not in self.subjects:
            return _NO_SUBJECT
        if not self.ignores_compatibility:
            self.compatibility[subject] = body["compatibility"]
        return 200, body


def _without_avro_type(entry: dict[str, str]) -> dict[str, str]:
    return {key: value for key, value in entry.items() if (key, value) != ("schemaType", "AVRO")}


@contextmanager
def running_registry() -> Iterator[RegistryDouble]:
    """The double on a free port of this machine."""
    double = RegistryDouble()

    class Handler(BaseHTTPRequestHandler):
        timeout = 5.0
        disable_nagle_algorithm = True
        protocol_version = "HTTP/1.1"

        def _serve(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            status, answer = double.answer(self.command, unquote(urlsplit(self.path).path), body)
            payload = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/vnd.schemaregistry.v1+json")
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            with suppress(BrokenPipeError, ConnectionResetError):  # who asked is gone, for instance killed
                self.wfile.write(payload)

        do_GET = do_POST = do_PUT = _serve  # noqa: N815 - the names that the base class looks for

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    double.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield double
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=5)
