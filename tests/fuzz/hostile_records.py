"""What a tenant that may write its own topic alone does with it: actions, as data that can be written down."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any
from uuid import UUID

from benchmarks.record_batches import Written, batch
from fairlane.clock import now_ms
from fairlane.records import CancelRequest, InferenceRequest, Message, RequestInput
from fairlane.schema_files import default_codec
from tests.fuzz import corpus
from tests.fuzz.mutation import mutated_bytes
from tests.fuzz.record_batch import repaired, some_batch

Action = Mapping[str, Any]

CODECS = ("lz4", "snappy", "zstd")
KINDS = ("records", "codecs", "odd-parts", "counts", "bombs", "cancels", "header-bytes", "batches")
"""What ``--without`` may leave out."""
_WEIGHTS = (40, 20, 10, 1, 1, 5, 3, 10)
_BOMB_BYTES = 40 * 1024 * 1024


def action(rng: Random, valid: InferenceRequest, without: frozenset[str]) -> Action:
    """One thing to do; ``valid`` is a request that would be answered."""
    kinds = [(kind, weight) for kind, weight in zip(KINDS, _WEIGHTS, strict=True) if kind not in without]
    (kind,) = rng.choices([kind for kind, _ in kinds], [weight for _, weight in kinds])
    codec = rng.choice(("none", "gzip"))
    encoded = default_codec().encode(valid)
    values = (*corpus.records(), encoded)
    match kind:
        case "header-bytes":
            header = (rng.choice((b"\xff\xfe", b"\xc3\x28", b"\xed\xa0\x80")), b"x")
            return _batch(kind, batch([Written(encoded, b"key", (header,))], timestamp_ms=now_ms()))
        case "batches":
            return _batch(kind, repaired(mutated_bytes(some_batch(rng, values, now_ms()), rng, values)))
        case "codecs":
            return _records(
                kind, rng.choice(CODECS), [_mutated(rng, encoded, values) for _ in range(rng.randint(1, 20))]
            )
        case "odd-parts":
            return _records(kind, codec, [_odd(rng, encoded) for _ in range(rng.randint(1, 5))])
        case "counts":
            many = RequestInput(messages=(Message("", ""),) * rng.choice((2_000, 100_000, 400_000)))
            return _records(kind, codec, [_part(default_codec().encode(replace(valid, input=many)))])
        case "bombs":
            compressed = rng.choice(("gzip", *(CODECS if "codecs" not in without else ())))
            return _records(kind, compressed, [_zeros(rng)])
        case "cancels":
            cancel = CancelRequest(str(UUID(bytes=rng.randbytes(16), version=4)))
            return _records(kind, codec, [_part(default_codec().encode(cancel))] * rng.randint(1, 20))
        case _:
            return _records(kind, codec, [_mutated(rng, encoded, values) for _ in range(rng.randint(1, 20))])


def bytes_of(part: Mapping[str, Any], name: str) -> bytes | None:
    """A key or a value of an action's record."""
    if name == part.get("of"):
        return bytes(part["zeros"])
    given = part.get(name)
    return None if given is None else base64.b64decode(given)


def _zeros(rng: Random) -> dict[str, Any]:
    return {"of": rng.choice(("key", "value")), "zeros": rng.choice((1, _BOMB_BYTES // 4, _BOMB_BYTES))}


def headers_of(part: Mapping[str, Any]) -> list[tuple[str, bytes]]:
    """The headers of an action's record."""
    return [(str(name), base64.b64decode(value)) for name, value in part.get("headers", ())]


def _mutated(rng: Random, encoded: bytes, values: Sequence[bytes]) -> dict[str, Any]:
    chosen = encoded if rng.random() < 0.6 else rng.choice(values)
    return _part(mutated_bytes(chosen, rng, values), rng.choice((b"key", None, b"")))


def _odd(rng: Random, encoded: bytes) -> dict[str, Any]:
    key = rng.choice((None, b"", rng.randbytes(65_536), b"\xff\xfe"))
    names = ("traceparent", "ce_id", "", "x" * 20_000, "\r\n", "content-type", "é")
    headers = [
        (rng.choice(names), rng.randbytes(rng.choice((0, 1, 55, 10_000)))) for _ in range(rng.choice((0, 3, 100)))
    ]
    return _part(rng.choice((encoded, None, b"", rng.randbytes(900_000))), key, headers)


def _part(value: bytes | None, key: bytes | None = b"key", headers: Sequence[tuple[str, bytes]] = ()) -> dict[str, Any]:
    return {"value": _text(value), "key": _text(key), "headers": [(name, _text(given)) for name, given in headers]}


def _records(kind: str, codec: str, records: Sequence[Mapping[str, Any]]) -> Action:
    return {"door": "kafka", "kind": kind, "codec": codec, "records": records}


def _batch(kind: str, batch: bytes) -> Action:
    return {"door": "kafka", "kind": kind, "batch": _text(batch)}


def _text(data: bytes | None) -> str | None:
    return None if data is None else base64.b64encode(data).decode()
