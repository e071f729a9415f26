"""Schemas from a Confluent-compatible schema registry, instead of the ids in ``schemas/ids.yaml``.

Subjects follow the record-name strategy: ``fairlane.<Record>``, whatever topic a record travels on. Needs the extra
``fairlane[registry]``.
"""

import json
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar
from urllib.parse import urlsplit, urlunsplit

from fairlane.codec import Codec, SchemaSource
from fairlane.records import type_by_name
from fairlane.schema_files import SchemaFiles, committed_schemas, default_codec
from fairlane.schema_form import canonical_form
from fairlane.settings import KafkaSettings

if TYPE_CHECKING:
    from confluent_kafka.schema_registry import RegisteredSchema

_NAMESPACE = "fairlane."
_COMPATIBILITY = "FULL_TRANSITIVE"
_TIMEOUT_S = 5.0
_RETRIES = 2
_RETRY_WAIT_MS = 100
_RETRY_MAX_WAIT_MS = 1_000
_MISSING_FOR_S = 30.0
_MAX_MISSING = 10_000
_NOT_FOUND = 404

ResultT = TypeVar("ResultT")
CallP = ParamSpec("CallP")
Clock = Callable[[], float]


class RegistryError(Exception):
    """The schema registry cannot be used, or disagrees with the committed schemas. One line, no secret."""


@dataclass(frozen=True, slots=True)
class Registered:
    """One schema of ours in the registry. ``new`` when it was not there before."""

    record: str
    subject: str
    version: int
    schema_id: int
    new: bool


def codec_for(settings: KafkaSettings) -> Codec:
    """The codec that SCHEMA_REGISTRY_URL asks for; unset: that of the committed ids. Raises RegistryError."""
    if settings.schema_registry_url is None:
        return default_codec()
    return Codec(RegistrySchemas(Registry(settings.schema_registry_url), committed_schemas()))


def subject_of(record_name: str) -> str:
    """The subject a record's schemas are registered under."""
    return _NAMESPACE + record_name


class RegistrySchemas(SchemaSource):
    """A schema source over a registry: its ids, the committed schemas, checked against each other at the start.

    Every version that the registry knows by then is read at once. An id that appears later is fetched when it is
    met, and one that does not exist is remembered for half a minute. A registry that cannot be asked about an id
    raises RegistryError from ``reader``: the record is not to blame, so it must not be treated as undecodable.
    """

    def __init__(self, registry: "Registry", committed: SchemaFiles, clock: Clock = time.monotonic) -> None:
        """Raises RegistryError when the registry does not answer or lacks a committed schema."""
        self._registry = registry
        self._clock = clock
        self._writers: dict[str, tuple[int, Mapping[str, Any]]] = {}
        self._readers: dict[int, tuple[str, Mapping[str, Any]]] = {}
        self._missing_until: OrderedDict[int, float] = OrderedDict()
        for name in committed.record_names:
            self._load(name, committed.writer(name)[1])

    def writer(self, record_name: str) -> tuple[int, Mapping[str, Any]]:
        return self._writers[record_name]

    def reader(self, schema_id: int) -> tuple[str, Mapping[str, Any]]:
        found = self._readers.get(schema_id)
        if found is not None:
            return found
        now = self._clock()
        if self._missing_until.get(schema_id, now) > now:
            raise KeyError(schema_id)
        fetched = self._registry.schema(schema_id)
        if fetched is None:
            self._missing_until[schema_id] = now + _MISSING_FOR_S
            self._missing_until.move_to_end(schema_id)
            if len(self._missing_until) > _MAX_MISSING:
                self._missing_until.popitem(last=False)
            raise KeyError(schema_id)
        self._readers[schema_id] = fetched
        return fetched

    def _load(self, name: str, committed: Mapping[str, Any]) -> None:
        subject, ours = subject_of(name), canonical_form(committed)
        versions = self._registry.versions(subject)
        for schema_id, schema in versions.items():
            theirs = _canonical_or_none(schema)
            if theirs is None:
                continue
            same = theirs == ours
            self._readers[schema_id] = (name, committed if same else schema)
            if same:
                self._writers[name] = (schema_id, committed)
        if name not in self._writers:
            known = f"its ids are {', '.join(map(str, versions))}" if versions else "it has no schema"
            raise RegistryError(
                f"SCHEMA_REGISTRY_URL={self._registry.url}: subject {subject} does not hold the committed schema"
                f" ({known}); `fairlane schemas register` adds it"
            )


class Registry:
    """The few calls of a schema registry that are needed, each with a timeout and limited retries."""

    def __init__(self, url: str) -> None:
        """Build the client; nothing is contacted. Raises RegistryError without the extra or for a bad URL."""
        self.url = without_userinfo(url)
        try:
            from confluent_kafka.schema_registry import Schema, SchemaRegistryClient
            from confluent_kafka.schema_registry.error import SchemaRegistryError
        except ImportError as error:
            raise RegistryError(f"SCHEMA_REGISTRY_URL needs the extra fairlane[registry]: {error.name}") from None
        self._schema_type = Schema
        self._refused = SchemaRegistryError
        try:
            self._client: SchemaRegistryClient = SchemaRegistryClient(
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
        # A codec lives as long as its process and nobody closes it; its connection goes with it.
        weakref.finalize(self, self._client.close)

    def versions(self, subject: str) -> dict[int, Mapping[str, Any]]:
        """Every schema of a subject by its id, oldest first; none for an unknown subject."""
        numbers = self._ask(self._client.get_versions, subject) or []
        schemas: dict[int, Mapping[str, Any]] = {}
        for number in sorted(numbers):
            registered = self._ask(self._client.get_version, subject, number)
            parsed = _avro_of(registered)
            if registered is not None and registered.schema_id is not None and parsed is not None:
                schemas[registered.schema_id] = parsed
        return schemas

    def schema(self, schema_id: int) -> tuple[str, Mapping[str, Any]] | None:
        """The record name and schema of an id; None for one that is unknown or is no record of ours."""
        found = self._ask(self._client.get_schema, schema_id)
        parsed = None if found is None else _parsed(found.schema_type, found.schema_str)
        if parsed is None or _canonical_or_none(parsed) is None:
            return None
        name = _full_name(parsed).removeprefix(_NAMESPACE)
        return (name, parsed) if _full_name(parsed) != name and name in type_by_name else None

    def register(self, record_name: str, schemas: Iterable[Mapping[str, Any]]) -> tuple[Registered, ...]:
        """Register schemas of a record, oldest first, under a subject that admits only compatible ones."""
        subject = subject_of(record_name)
        before = self.versions(subject)
        if not before:
            self._ask(self._client.set_compatibility, subject, _COMPATIBILITY)
        known = {_canonical_or_none(schema) for schema in before.values()}
        done = []
        for schema in schemas:
            avro = self._schema_type(json.dumps(schema), "AVRO")
            answer = self._ask(self._client.register_schema, subject, avro)
            found = None if answer is None else self._ask(self._client.lookup_schema, subject, avro)
            if found is None or found.schema_id is None or found.version is None:
                raise self._error(f"{subject} was not registered")
            new = canonical_form(schema) not in known
            done.append(Registered(record_name, subject, found.version, found.schema_id, new))
        return tuple(done)

    def _ask(
        self, request: Callable[CallP, ResultT], *arguments: CallP.args, **options: CallP.kwargs
    ) -> ResultT | None:
        """The answer; None for "not found". Raises RegistryError for anything else."""
        try:
            return request(*arguments, **options)
        except self._refused as error:
            if error.http_status_code == _NOT_FOUND:
                return None
            raise self._error(f"{error.error_message} (status {error.http_status_code})") from None
        except Exception as error:  # noqa: BLE001 - the client lets through whatever its HTTP library of the day raises
            raise self._error(f"{type(error).__name__}: {error}") from None

    def _error(self, reason: str) -> RegistryError:
        return RegistryError(f"SCHEMA_REGISTRY_URL={self.url}: {' '.join(reason.split())}")


def without_userinfo(url: str) -> str:
    """The URL without a user and password, fit to be printed."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _avro_of(registered: "RegisteredSchema | None") -> Mapping[str, Any] | None:
    if registered is None or registered.schema is None:
        return None
    return _parsed(registered.schema.schema_type, registered.schema.schema_str)


def _parsed(schema_type: str | None, text: str | None) -> Mapping[str, Any] | None:
    # A registry leaves the type out when it is Avro.
    if schema_type not in {None, "AVRO"} or text is None:
        return None
    try:
        schema = json.loads(text)
    except ValueError:
        return None
    return schema if isinstance(schema, dict) else None


def _canonical_or_none(schema: Mapping[str, Any]) -> str | None:
    try:
        return canonical_form(schema)
    except Exception:  # noqa: BLE001 - a foreign schema fails in many ways; all mean that it is none of ours
        return None


def _full_name(schema: Mapping[str, Any]) -> str:
    name, namespace = str(schema.get("name", "")), schema.get("namespace")
    return name if "." in name or not namespace else f"{namespace}.{name}"
