"""Schemas from a Confluent-compatible schema registry, instead of the ids in ``schemas/ids.yaml``.

Subjects follow the record-name strategy: ``fairlane.<Record>``, on every topic. Needs the extra ``fairlane[registry]``.
"""

import json
import logging
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar, cast
from urllib.parse import urlsplit, urlunsplit

from fairlane.codec import Codec, SchemaSource
from fairlane.schema_files import SchemaFiles, canonical_form, committed_schemas, default_codec
from fairlane.schema_safety import MAX_SCHEMA_CHARS, SchemaRefusedError, check_schema, full_name
from fairlane.settings import KafkaSettings

log = logging.getLogger(__name__)

_NAMESPACE = "fairlane."
_COMPATIBILITY = "FULL_TRANSITIVE"
_TIMEOUT_S = 5.0
_RETRIES = 2
_RETRY_WAIT_MS = 100
_RETRY_MAX_WAIT_MS = 1_000
_MISSING_FOR_S = 30.0
_MAX_MISSING = 10_000
_REFRESH_TIMEOUT_S = 15.0
_MAX_VERSIONS = 1_000
"""Versions read of one record: the newest."""
_NOT_FOUND = 404

ResultT = TypeVar("ResultT")
CallP = ParamSpec("CallP")
Clock = Callable[[], float]


class RegistryError(Exception):
    """The schema registry cannot be used, or disagrees with the committed schemas. The message is one line without
    secrets."""


@dataclass(frozen=True, slots=True)
class Registered:
    """One of our schemas in the registry. ``new`` when it was not registered before."""

    record: str
    subject: str
    version: int
    schema_id: int
    new: bool


def codec_for(settings: KafkaSettings) -> Codec:
    """Codec of the registry at SCHEMA_REGISTRY_URL; when that is unset, of the committed ids. Raises RegistryError."""
    if settings.schema_registry_url is None:
        return default_codec()
    return Codec(RegistrySchemas(RegistryClient(settings.schema_registry_url), committed_schemas()))


def subject_of(record_name: str) -> str:
    """Subject of a record's schemas."""
    return _NAMESPACE + record_name


class RegistrySchemas(SchemaSource):
    """Schema source over a registry, checked at the start against the committed schemas.

    An id is known only if it belongs to one of our subjects and its schema passes ``judge``. All versions that exist at
    the start are read at once. For an unknown id ``reader`` lists our subjects again; an id that stays unknown is
    remembered for half a minute. When the registry does not answer, RegistryError is raised: the record is not to blame
    and must not be treated as undecodable. Thread-safe.
    """

    def __init__(self, registry: "RegistryClient", committed: SchemaFiles, clock: Clock = time.monotonic) -> None:
        """Raises RegistryError when the registry does not answer or lacks a committed schema."""
        self._registry = registry
        self._clock = clock
        self._committed = {name: committed.writer(name)[1] for name in committed.record_names}
        self._forms = {name: canonical_form(schema) for name, schema in self._committed.items()}
        self._writers: dict[str, tuple[int, Mapping[str, Any]]] = {}
        self._readers: dict[int, tuple[str, Mapping[str, Any]]] = {}
        self._read_versions: dict[str, dict[int, int]] = {name: {} for name in self._committed}
        """Per record, the schema id of each version that was read, whether its schema is used or not."""
        self._missing_until: OrderedDict[int, float] = OrderedDict()
        self._lock = threading.Lock()
        self.refresh(timeout_s=None)
        for name in self._committed:
            self._check_committed(name)

    def writer(self, record_name: str) -> tuple[int, Mapping[str, Any]]:
        return self._writers[record_name]

    def reader(self, schema_id: int) -> tuple[str, Mapping[str, Any]]:
        found = self._readers.get(schema_id)
        if found is not None:
            return found
        now = self._clock()
        if self._missing_until.get(schema_id, now) > now:
            raise KeyError(schema_id)
        self.refresh()
        found = self._readers.get(schema_id)
        if found is None:
            with self._lock:
                self._missing_until[schema_id] = now + _MISSING_FOR_S
                self._missing_until.move_to_end(schema_id)
                if len(self._missing_until) > _MAX_MISSING:
                    self._missing_until.popitem(last=False)
            raise KeyError(schema_id)
        return found

    def is_loaded(self, schema_id: int) -> bool:
        return schema_id in self._readers

    def refresh(self, timeout_s: float | None = _REFRESH_TIMEOUT_S) -> None:
        """Read what was registered since the last call: one request per subject, and one per new version.

        A schema registered before this call began is known when it returns. Raises RegistryError.
        """
        # Before the lock: waiting for another thread's call is waiting for the registry as well.
        until = None if timeout_s is None else self._clock() + timeout_s
        with self._lock:
            for name, known in self._read_versions.items():
                for version in self._registry.versions(subject_of(name))[-_MAX_VERSIONS:]:
                    if until is not None and self._clock() > until:
                        raise self._registry.error(f"did not answer within {timeout_s:g} s")
                    if version not in known:
                        self._load(name, version)

    def _load(self, name: str, version: int) -> None:
        subject = subject_of(name)
        found = self._registry.version(subject, version)
        if found is None:
            return  # deleted meanwhile
        schema_id, text = found
        self._read_versions[name][version] = schema_id
        try:
            schema = _own_schema(text, subject)
        except SchemaRefusedError as error:
            log.warning(
                "schema_refused subject=%s version=%d schema_id=%d reason=%s", subject, version, schema_id, error
            )
            return
        committed = self._committed[name]
        same = canonical_form(schema) == self._forms[name]
        if same:
            self._writers[name] = (schema_id, committed)
        self._readers[schema_id] = (name, committed if same else schema)

    def _check_committed(self, name: str) -> None:
        if name not in self._writers:
            ids = self._read_versions[name].values()
            known = f"its ids are {', '.join(map(str, ids))}" if ids else "it has no schema"
            raise self._registry.error(
                f"subject {subject_of(name)} does not hold the committed schema"
                f" ({known}); `fairlane schemas register` adds it"
            )


class RegistryClient:
    """The few registry calls that are needed, each with a timeout and limited retries."""

    def __init__(self, url: str) -> None:
        """Build the client without contacting the registry. Raises RegistryError without the extra or for an invalid
        URL."""
        self.url = without_userinfo(url)
        try:
            from confluent_kafka.schema_registry import Schema, SchemaRegistryClient
            from confluent_kafka.schema_registry.error import SchemaRegistryError
        except ImportError as error:
            raise RegistryError(f"SCHEMA_REGISTRY_URL needs the extra fairlane[registry]: {error.name}") from None
        self._schema_type = Schema
        self._refused = SchemaRegistryError
        try:
            self._client = SchemaRegistryClient(
                {
                    "url": url,
                    "timeout": _TIMEOUT_S,
                    "max.retries": _RETRIES,
                    "retries.wait.ms": _RETRY_WAIT_MS,
                    "retries.max.wait.ms": _RETRY_MAX_WAIT_MS,
                }
            )
        except ValueError:
            raise RegistryError(f"SCHEMA_REGISTRY_URL={self.url}: must be an http or https URL") from None
        # Codecs live as long as the process and are never closed; the connection is closed with this object.
        weakref.finalize(self, self._client.close)

    def versions(self, subject: str) -> list[int]:
        """Version numbers of a subject, oldest first; empty for an unknown subject."""
        numbers: Any = self._ask(self._client.get_versions, subject) or []
        if not isinstance(numbers, list) or not all(isinstance(number, int) for number in numbers):
            raise self.error(f"the versions of {subject} are no list of numbers")
        return sorted(numbers)

    def version(self, subject: str, version: int) -> tuple[int, str | None] | None:
        """Schema id and schema text of a version; None when the version does not exist. The text is None when the
        schema is not Avro or refers to others."""
        registered: Any = self._ask(self._client.get_version, subject, version)
        if registered is None or registered.schema_id is None:
            return None
        schema: Any = registered.schema
        # Registries omit the type of Avro schemas.
        is_avro = schema is not None and schema.schema_type in {None, "AVRO"} and not schema.references
        return registered.schema_id, schema.schema_str if is_avro else None

    def register(self, record_name: str, schemas: Iterable[Mapping[str, Any]]) -> tuple[Registered, ...]:
        """Register a record's schemas, oldest first, under a subject that accepts only compatible ones. Raises
        RegistryError."""
        subject = subject_of(record_name)
        done: list[Registered] = []
        for schema in schemas:
            avro = self._schema_type(json.dumps(schema), "AVRO")
            known = self._ask(self._client.lookup_schema, subject, avro)
            if known is None:
                self._ask(self._client.register_schema, subject, avro)
            found = known or self._ask(self._client.lookup_schema, subject, avro)
            if found is None or found.schema_id is None or found.version is None:
                raise self.error(f"{subject} was not registered")
            if not done:
                # Only now: Apicurio has no subject, and no rules for it, before its first version.
                self._ensure_compatibility(subject)
            done.append(Registered(record_name, subject, found.version, found.schema_id, new=known is None))
        return tuple(done)

    def _ensure_compatibility(self, subject: str) -> None:
        """Raises RegistryError unless the registry confirms the compatibility level."""
        if self._ask(self._client.get_compatibility, subject) == _COMPATIBILITY:
            return
        self._ask(self._client.set_compatibility, subject, _COMPATIBILITY)
        level = self._ask(self._client.get_compatibility, subject)
        if level != _COMPATIBILITY:
            raise self.error(f"the compatibility of {subject} is {level or 'not set'}, and was to be {_COMPATIBILITY}")

    def _ask(
        self, request: Callable[CallP, ResultT], *arguments: CallP.args, **options: CallP.kwargs
    ) -> ResultT | None:
        """The response; None for "not found". Raises RegistryError for any other failure."""
        try:
            return request(*arguments, **options)
        except self._refused as error:
            if error.http_status_code == _NOT_FOUND:
                return None
            raise self.error(f"{error.error_message} (status {error.http_status_code})") from None
        except Exception as error:  # noqa: BLE001 - the client lets through whatever its HTTP library of the day raises
            raise self.error(f"{type(error).__name__}: {error}") from None

    def error(self, reason: str) -> RegistryError:
        """An error with this reason and the address, without its password."""
        return RegistryError(f"SCHEMA_REGISTRY_URL={self.url}: {' '.join(reason.split())}")


def without_userinfo(url: str) -> str:
    """The URL without user and password, safe to print."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _own_schema(text: str | None, subject: str) -> dict[str, Any]:
    """Parse a schema registered under one of our subjects. Raises SchemaRefusedError when it must not be used."""
    if text is None:
        raise SchemaRefusedError("no Avro, or one that needs other schemas")
    if len(text) > MAX_SCHEMA_CHARS:
        raise SchemaRefusedError(f"{len(text)} characters are more than {MAX_SCHEMA_CHARS}")
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):
        raise SchemaRefusedError("no JSON, or nested too deep") from None
    try:
        check_schema(schema)
        canonical_form(schema)
    except SchemaRefusedError:
        raise
    except Exception as error:  # noqa: BLE001 - fastavro fails in many ways on a schema; all mean that it cannot be used
        raise SchemaRefusedError(f"no Avro schema ({type(error).__name__})") from None
    if full_name(str(schema.get("name", "")), schema.get("namespace")) != subject:
        raise SchemaRefusedError(f"its name is not {subject}")
    return cast("dict[str, Any]", schema)
