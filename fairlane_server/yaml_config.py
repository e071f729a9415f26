"""YAML configuration files, and the same in JSON: plain values with their source lines.

A loader walks the tree through `YamlNode` and asks for what it expects; a value that is missing, unknown or of the
wrong kind raises a `ConfigError` with the file, the line and the key.
"""

import json
import re
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import yaml

_LARGEST_INTEGER = 2**63 - 1
_DECIMAL = re.compile(r"([0-9]{1,18})(?:\.([0-9]{1,18}))?")
_UTC = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}(T[0-9]{2}:[0-9]{2}:[0-9]{2}Z)?")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class ConfigError(Exception):
    """Invalid configuration file. ``line`` counts from 1; None when the file could not be read. ``key`` is the dotted
    path of the value at fault, "" where there is none."""

    def __init__(self, file: Path, line: int | None, message: str, key: str = "") -> None:
        place = str(file) if line is None else f"{file}:{line}"
        super().__init__(f"{place}: {message}")
        self.file = file
        self.line = line
        self.message = message
        self.key = key


@dataclass(frozen=True, slots=True)
class YamlNode:
    """One value and its position. ``key`` is its dotted path, such as ``models[1].limits``; "" is the whole file.
    ``text`` is a scalar as it is written, without quotes."""

    file: Path
    line: int
    key: str
    value: object
    fields: dict[str, "YamlNode"] = field(default_factory=dict)
    items: tuple["YamlNode", ...] = ()
    text: str | None = None

    def error(self, message: str) -> ConfigError:
        """Build an error about this value, for the caller to raise."""
        return ConfigError(self.file, self.line, f"{self.key}: {message}" if self.key else message, self.key)

    def mapping(self, required: Set[str], optional: Set[str] = frozenset()) -> dict[str, "YamlNode"]:
        """The fields by name. Raises ConfigError for an unknown or missing one."""
        if not isinstance(self.value, dict):
            raise self.error("must be a mapping")
        for name, node in self.fields.items():
            if name not in required | optional:
                known = ", ".join(sorted(required | optional))
                raise node.error(f"unknown key; known here: {known}")
        missing = required - self.fields.keys()
        if missing:
            raise self.error(f"missing: {', '.join(sorted(missing))}")
        return self.fields

    def read(self, required: "Mapping[str, Reader]", optional: "Mapping[str, Reader]") -> dict[str, Any]:
        """The values of the fields that are there, each read by the function of its name. Raises as ``mapping``."""
        readers = {**required, **optional}
        return {name: readers[name](node) for name, node in self.mapping(required.keys(), optional.keys()).items()}

    def sequence(self) -> tuple["YamlNode", ...]:
        """The items of a list."""
        if not isinstance(self.value, list):
            raise self.error("must be a list")
        return self.items

    def string(self, pattern: re.Pattern[str] | None = None) -> str:
        """A non-empty string, which must match ``pattern`` as a whole if one is given."""
        if not isinstance(self.value, str):
            raise self.error(f"must be a string, not {self.value!r} (quote it)")
        if not self.value:
            raise self.error("must not be empty")
        if pattern is not None and pattern.fullmatch(self.value) is None:
            raise self.error(f"{self.value!r} does not match {pattern.pattern}")
        return self.value

    def strings(self, pattern: re.Pattern[str] | None = None) -> tuple[str, ...]:
        """A list of distinct strings."""
        seen: list[str] = []
        for item in self.sequence():
            if item.string(pattern) in seen:
                raise item.error(f"{item.value!r} appears twice")
            seen.append(item.string(pattern))
        return tuple(seen)

    def choice(self, kind: str, known: Collection[str]) -> str:
        """One of the known strings; ``kind`` says what they are."""
        value = self.string()
        if value not in known:
            raise self.error(f"unknown {kind} {value!r}; known: {', '.join(known)}")
        return value

    def choices(self, kind: str, known: Collection[str], *, least: int = 0) -> tuple[str, ...]:
        """A list of distinct ones of the known strings; with ``least`` 1 it must not be empty."""
        values = self.strings()
        for item in self.items:
            item.choice(kind, known)
        if len(values) < least:
            raise self.error(f"at least one {kind} is needed")
        return values

    def boolean(self) -> bool:
        if not isinstance(self.value, bool):
            raise self.error(f"must be true or false, not {self.value!r}")
        return self.value

    def integer(self, minimum: int, maximum: int | None = None) -> int:
        """A whole number within the bounds, both included, and at most 2**63 - 1, the most that a record can carry."""
        if not isinstance(self.value, int) or isinstance(self.value, bool):
            raise self.error(f"must be a whole number, not {self.value!r}")
        if self.value < minimum or (maximum is not None and self.value > maximum):
            bounds = f"at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
            raise self.error(f"must be {bounds}, not {self.value}")
        if self.value > _LARGEST_INTEGER:
            raise self.error(f"must be at most {_LARGEST_INTEGER}")
        return self.value

    def number(self, minimum: float, maximum: float) -> float:
        """A number within the bounds, both included."""
        if not isinstance(self.value, int | float) or isinstance(self.value, bool):
            raise self.error(f"must be a number, not {self.value!r}")
        if not minimum <= self.value <= maximum:
            raise self.error(f"must be from {minimum} to {maximum}, not {self.value}")
        return float(self.value)

    def decimal(self, places: int, maximum: int) -> int:
        """A decimal number from 0 to ``maximum``, in units of its last of ``places`` decimal places. It is read as it
        is written, never as a float."""
        found = None if self.text is None else _DECIMAL.fullmatch(self.text)
        if found is None:
            raise self.error(f"must be a decimal number from 0 on, such as 0.25, not {self.value!r}")
        whole, fraction = found[1], found[2] or ""
        if len(fraction.rstrip("0")) > places:
            raise self.error(f"must have at most {places} decimal places, not {self.text}")
        units_per_one: int = 10**places
        units = int(whole) * units_per_one + int(fraction[:places].ljust(places, "0"))
        if units > maximum * units_per_one:
            raise self.error(f"must be from 0 to {maximum}, not {self.text}")
        return units

    def utc_ms(self) -> int:
        """A date, or a date and a time in UTC that ends in Z, as milliseconds since the epoch."""
        if self.text is None or _UTC.fullmatch(self.text) is None:
            raise self.error(f"must be a date or a UTC time, 2026-01-31 or 2026-01-31T18:00:00Z, not {self.value!r}")
        try:
            at = datetime.fromisoformat(self.text.removesuffix("Z"))
        except ValueError as error:
            raise self.error(f"{self.text}: {error}") from None
        return (at.replace(tzinfo=UTC) - _EPOCH) // timedelta(milliseconds=1)


Reader = Callable[[YamlNode], Any]
"""Makes a value of a node. Raises ConfigError."""


def load_yaml_with_lines(path: Path) -> YamlNode:
    """Read one YAML document. Raises ConfigError for an unreadable file, invalid YAML, duplicate or non-string keys."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(path, None, f"cannot be read: {error}") from error
    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            raise ConfigError(path, 1, "is empty")
        return _Builder(path, loader).build(root, "", root.start_mark.line + 1, ())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        reason = " ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError(path, None if mark is None else mark.line + 1, f"not YAML: {reason}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(path, None, f"not YAML: {error}") from error
    finally:
        loader.dispose()


def load_json(raw: bytes) -> YamlNode:
    """Read one JSON document as if it were YAML; the place of every value is its key. Raises ConfigError for invalid
    JSON, and for duplicate keys."""
    try:
        value = json.loads(raw, parse_float=_WrittenNumber, parse_constant=_refused, object_pairs_hook=_Pairs)
        return _json_node(value, "")
    except (ValueError, RecursionError):
        raise ConfigError(_BODY, None, "not JSON") from None


_BODY = Path("body")


class _WrittenNumber(float):
    """A number with the text that it was written as."""

    text: str

    def __new__(cls, text: str) -> "_WrittenNumber":
        made = super().__new__(cls, text)
        made.text = text
        return made


class _Pairs(list[tuple[str, Any]]):
    """The keys and values of an object, in order."""


def _refused(_name: str) -> None:
    raise ValueError


def _json_node(value: Any, key: str) -> YamlNode:
    if isinstance(value, _Pairs):
        fields: dict[str, YamlNode] = {}
        for name, inner in value:
            place = f"{key}.{name}" if key else name
            if name in fields:
                raise ConfigError(_BODY, None, f"{place}: duplicate key", place)
            fields[name] = _json_node(inner, place)
        return YamlNode(_BODY, 0, key, {name: child.value for name, child in fields.items()}, fields)
    if isinstance(value, list):
        items = tuple(_json_node(item, f"{key}[{index}]") for index, item in enumerate(value))
        return YamlNode(_BODY, 0, key, [item.value for item in items], items=items)
    text = value.text if isinstance(value, _WrittenNumber) else None if value is None else str(value)
    return YamlNode(_BODY, 0, key, value, text=text)


def cycle_from(name: str, next_of: Mapping[str, str | None]) -> tuple[str, ...]:
    """The cycle from ``name`` back to itself, both ends included; empty when the chain ends or cycles elsewhere."""
    way = [name]
    while (following := next_of.get(way[-1])) is not None:
        if following == name:
            return (*way, name)
        if following in way:
            break
        way.append(following)
    return ()


@dataclass(frozen=True, slots=True)
class _Builder:
    file: Path
    loader: yaml.SafeLoader

    def build(self, node: yaml.Node, key: str, line: int, parents: tuple[yaml.Node, ...]) -> YamlNode:
        """``line`` is that of the key of the value, which is where a person looks."""
        if node in parents:
            raise ConfigError(self.file, line, f"{key}: an alias refers to a value that contains it")
        inside = (*parents, node)
        if isinstance(node, yaml.MappingNode):
            fields = {
                name: self.build(value, f"{key}.{name}" if key else name, at, inside)
                for name, value, at in self._pairs(node)
            }
            return YamlNode(self.file, line, key, {name: child.value for name, child in fields.items()}, fields)
        if isinstance(node, yaml.SequenceNode):
            items = tuple(
                self.build(item, f"{key}[{index}]", item.start_mark.line + 1, inside)
                for index, item in enumerate(node.value)
            )
            return YamlNode(self.file, line, key, [item.value for item in items], items=items)
        try:
            value = self.loader.construct_object(node)
        except ValueError as error:
            # A date such as 2026-02-30.
            raise ConfigError(self.file, line, f"{key}: {error}") from None
        return YamlNode(self.file, line, key, value, text=node.value)

    def _pairs(self, node: yaml.MappingNode) -> Iterator[tuple[str, yaml.Node, int]]:
        seen: dict[Hashable, int] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            name = self.loader.construct_object(key_node) if isinstance(key_node, yaml.ScalarNode) else None
            if not isinstance(name, str):
                raise ConfigError(self.file, line, "a key must be a string")
            if name in seen:
                raise ConfigError(self.file, line, f"{name}: duplicate key, first on line {seen[name]}")
            seen[name] = line
            yield name, value_node, line
