"""What the tests of hostile records share: a pipeline, a registry with the committed ids, and bytes made by hand."""

import json
from pathlib import Path

from fairlane import names
from fairlane.registry import subject_of
from fairlane.schema_files import committed_schemas
from tests.contract.registry_double import RegistryDouble
from tests.hostile.neighbour import Neighbour
from tests.integration.pipeline import Pipeline
from tests.integration.processes import ServiceProcess
from tests.waiting import eventually


def fill(registry: RegistryDouble) -> None:
    """Register every committed schema under the id it has in the files, so that either codec reads the other's."""
    committed = committed_schemas()
    for schema_id in range(1, 1_000):
        try:
            name, schema = committed.reader(schema_id)
        except KeyError:
            continue
        registry.schemas[schema_id] = {"schema": json.dumps(schema), "schemaType": "AVRO"}
        registry.subjects.setdefault(subject_of(name), []).append(schema_id)
    registry.next_id = 1_000


def under(schema_id: int, data: bytes) -> bytes:
    """The record in these bytes, with another schema id in its frame."""
    return b"\x00" + schema_id.to_bytes(4, "big") + data[5:]


def long(value: int) -> bytes:
    """Avro's zigzag varint."""
    rest, out = (value << 1 ^ value >> 63) & 2**64 - 1, bytearray()
    while rest > 0x7F:
        out.append(rest & 0x7F | 0x80)
        rest >>= 7
    return bytes([*out, rest])


def string(text: str) -> bytes:
    return long(len(text.encode())) + text.encode()


def peak_bytes(process: ServiceProcess) -> int:
    """The most memory a process had at a time."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return 1_024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")))


def warm(pipeline: Pipeline, *tenants: str) -> None:
    """The first requests wait for connections, and tell nothing of the later ones."""
    replies = pipeline.replies(*tenants)
    for tenant in tenants:
        requests = [pipeline.request() for _ in range(20)]
        pipeline.publish(tenant, *requests)
        replies.wait([request.request_id for request in requests])


def requests_topic(pipeline: Pipeline, tenant: str) -> str:
    return names.requests_topic(pipeline.tenant(tenant))


def calm_p99_s(pipeline: Pipeline, tenant: str, requests: int = 60) -> float:
    """How long the neighbour waits while nobody else sends."""
    with Neighbour(pipeline, tenant) as neighbour:
        eventually(lambda: len(neighbour.waits_s) >= requests, 60.0, "answers to the neighbour")
    return neighbour.p99_s


def assert_undisturbed(neighbour: Neighbour, calm_s: float) -> None:
    """The bound is loose, for these tests share a machine; it is far below what a dispatcher that waits costs."""
    waits = f"p99 {neighbour.p99_s:.3f} s of {len(neighbour.waits_s)}, {calm_s:.3f} s without a hostile tenant"
    assert neighbour.p99_s < max(3 * calm_s, 1.0), waits
