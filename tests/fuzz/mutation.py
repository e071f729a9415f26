"""Mutations of valid inputs: bytes, and JSON documents. All choices come from the given generator."""

import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

MOST_BYTES = 65_536
"""Of an input. Larger ones are attacks of their own (``hostile_records``); these are many and small."""

Mutation = Callable[[bytes, Random, Sequence[bytes]], bytes]

_BYTES = (b"\x00", b"\x01", b"\x02", b"\x7f", b"\x80", b"\xff")
_PIECES = (
    # Numbers as Avro and Kafka's records write them: the largest, the smallest, one that does not end.
    b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
    b"\xfe\xff\xff\xff\xff\xff\xff\xff\xff\x01",
    b"\x80" * 12,
    b"\xff\xff\xff\xff\x0f",
    b"\xfe\xff\xff\xff\x07",
    b"\x7f\xff\xff\xff",
    b"\x80\x00\x00\x00",
    # Floats: NaN, infinity.
    b"\x00\x00\x00\x00\x00\x00\xf8\x7f",
    b"\x00\x00\x00\x00\x00\x00\xf0\x7f",
    # Text: no UTF-8, a lone surrogate, NUL, a header's end.
    b"\xc3\x28",
    b"\xed\xa0\x80",
    b"\xf8\x88\x80\x80\x80",
    b"\x00\x00",
    b"\r\n",
)


def _flipped(data: bytes, rng: Random, _others: Sequence[bytes]) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]


def _set(data: bytes, rng: Random, _others: Sequence[bytes]) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + rng.choice(_BYTES) + data[at + 1 :]


def _inserted(data: bytes, rng: Random, _others: Sequence[bytes]) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.randbytes(rng.randint(1, 16)) + data[at:]


def _piece(data: bytes, rng: Random, _others: Sequence[bytes]) -> bytes:
    at, piece = rng.randrange(len(data) + 1), rng.choice(_PIECES)
    return data[:at] + piece + data[at + (len(piece) if rng.random() < 0.5 else 0) :]


def _removed(data: bytes, rng: Random, _others: Sequence[bytes]) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + data[at + rng.randint(1, 32) :]


def _cut(data: bytes, rng: Random, _others: Sequence[bytes]) -> bytes:
    return data[: rng.randrange(len(data))]


def _repeated(data: bytes, rng: Random, _others: Sequence[bytes]) -> bytes:
    at = rng.randrange(len(data))
    part = data[at : at + rng.randint(1, 64)]
    return data[:at] + part * rng.choice((2, 3, 200)) + data[at:]


def _spliced(data: bytes, rng: Random, others: Sequence[bytes]) -> bytes:
    other = rng.choice(others)
    return data[: rng.randrange(len(data))] + other[rng.randrange(len(other) + 1) :]


def _headed(data: bytes, rng: Random, others: Sequence[bytes]) -> bytes:
    """The beginning of another: a record's body below the schema id of another type."""
    size = rng.choice((1, 5, 12))
    return rng.choice(others)[:size] + data[size:]


_MUTATIONS: tuple[Mutation, ...] = (
    *(_flipped, _set, _inserted, _piece, _piece, _removed, _cut, _repeated, _spliced, _headed),
)


def mutated_bytes(data: bytes, rng: Random, others: Sequence[bytes]) -> bytes:
    """One to six mutations; ``others`` are what is spliced in."""
    for _ in range(rng.choice((1, 1, 2, 3, 6))):
        if not data:
            return rng.randbytes(rng.randint(0, 8))
        data = rng.choice(_MUTATIONS)(data, rng, others)[:MOST_BYTES]
    return data


class _Raw(float):
    """Something that JSON's writer would not write: its text stands in the document as it is."""

    def __new__(cls, text: str) -> "_Raw":
        made = super().__new__(cls, 0.0)
        made.text = text
        return made

    text: str

    def __repr__(self) -> str:
        return self.text


def _leaf(rng: Random) -> Any:
    return rng.choice(
        (
            *(None, True, False, "", [], {}, 0, -1, 1, 0.5, -0.0, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63) - 1),
            *(
                "\0",
                "a\r\nb: c",
                "\ud800",
                "\udfff\ud800",
                "\u202e",
                "é" * 1_000,
                "x" * 40_000,
                "\u0000" * 100,
                "../../x",
                "%00",
            ),
            *(
                _Raw("NaN"),
                _Raw("Infinity"),
                _Raw("-Infinity"),
                _Raw("1e400"),
                _Raw("9" * 5_000),
                _Raw("1." + "0" * 5_000),
            ),
            *(_Raw("[" * 500 + "]" * 500), _Raw('{"a":' * 300 + "1" + "}" * 300), _Raw('{"a":1,"a":2}'), _Raw("01")),
            *(["x"] * 600, [[]] * 300, {str(number): number for number in range(200)}),
        )
    )


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path]
    if isinstance(value, dict):
        for key, inner in value.items():
            found += _places(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value[:20]):
            found += _places(inner, (*path, index))
    return found


def _changed(document: Any, rng: Random) -> Any:
    path = rng.choice(_places(document))
    if not path:
        return _leaf(rng) if rng.random() < 0.05 else document
    *way, last = path
    holder = document
    for step in way:
        holder = holder[step]
    match rng.randrange(6):
        case 0 if isinstance(holder, dict):
            holder[rng.choice(("", "x" * 300, "\ud800", "model", "stream", "fairlane", "__proto__", "n"))] = _leaf(rng)
        case 1 if isinstance(holder, dict):
            holder[f"{last}_"] = holder.pop(last)
        case 1 | 2:
            del holder[last]
        case 3:
            holder[last] = [holder[last]] * rng.choice((1, 2, 700))
        case _:
            holder[last] = _leaf(rng)
    return document


def mutated_json(data: bytes, rng: Random, others: Sequence[bytes]) -> bytes:
    """One to four changes of values and names, and now and then of the bytes. What is no JSON is changed as bytes."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return mutated_bytes(data, rng, others)
    for _ in range(rng.choice((1, 1, 2, 4))):
        document = _changed(document, rng)
    text = json.dumps(document, ensure_ascii=rng.random() < 0.7, default=str)
    made = text.encode("utf-8", "surrogatepass")[:MOST_BYTES]
    return mutated_bytes(made, rng, others) if rng.random() < 0.15 else made
