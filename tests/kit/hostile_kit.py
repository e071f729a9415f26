"""What the tests of hostile records share: a pipeline, a registry with the committed ids, and bytes made by hand."""

import json

from benchmarks.load import Neighbour
from benchmarks.service_curve import percentile
from fairlane import names
from fairlane.schema_files import committed_schemas
from fairlane.schema_registry import subject_of
from tests.contract.registry_double import RegistryDouble
from tests.kit.pipeline import Pipeline


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


def warm(pipeline: Pipeline, *tenants: str) -> None:
    """The first requests wait for connections, and tell nothing of the later ones."""
    replies = pipeline.replies(*tenants)
    for tenant in tenants:
        requests = [pipeline.request() for _ in range(20)]
        pipeline.publish(tenant, *requests)
        replies.wait([request.request_id for request in requests])


def requests_topic(pipeline: Pipeline, tenant: str) -> str:
    return names.requests_topic(pipeline.tenant(tenant))


def neighbour(pipeline: Pipeline, tenant: str) -> Neighbour:
    """A tenant of the pipeline that sends honest requests."""
    return Neighbour(pipeline.settings, pipeline.codec, pipeline.tenant(tenant), pipeline.request, per_s=20.0)


def calm_p99_s(pipeline: Pipeline, tenant: str, requests: int = 60) -> float:
    """How long the neighbour waits while nobody else sends."""
    with neighbour(pipeline, tenant).sending() as calm:
        calm.wait_replies(requests)
    return percentile(calm.latencies_s(), 0.99)


def assert_undisturbed(beside: Neighbour, calm_s: float) -> None:
    """The bound is loose, for these tests share a machine; it is far below what a dispatcher that waits costs."""
    p99_s = percentile(beside.latencies_s(), 0.99)
    waits = f"p99 {p99_s:.3f} s of {beside.mark()}, {calm_s:.3f} s without a hostile tenant"
    assert p99_s < max(3 * calm_s, 1.0), waits
