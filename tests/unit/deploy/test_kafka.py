"""What the Kafka of a stack is made of: one node, or three that are one cluster."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.local import kafka
from deploy.local.certificates import Certificates
from deploy.local.kafka import (
    BROKER_SETTINGS,
    FIRST_COMPILER,
    HEAP,
    REPLICATED_SETTINGS,
    Kafka,
    KafkaSecurity,
    class_archive,
    compose_kafka,
    find_java,
    holds_data,
    node_names,
    part_of,
)
from deploy.local.layout import StackError
from deploy.local.ports import PortClaims
from deploy.local.supervisor import ProcessSpec


@pytest.fixture
def ports() -> Iterator[PortClaims]:
    claims = PortClaims()
    yield claims
    claims.close()


@pytest.fixture
def libs(tmp_path: Path) -> Path:
    folder = tmp_path / "libs"
    folder.mkdir()
    (folder / "kafka_2.13-4.2.0.jar").touch()
    return folder


@pytest.fixture
def three(tmp_path: Path, ports: PortClaims, libs: Path) -> tuple[Kafka, ...]:
    return compose_kafka(tmp_path / "kafka", 3, ports, libs)


def properties(node: Kafka) -> dict[str, str]:
    """What was written for a node."""
    lines = (node.folder / "server.properties").read_text(encoding="utf-8").splitlines()
    assert len({line.split("=")[0] for line in lines}) == len(lines)
    return dict(line.split("=", 1) for line in lines)


def by_name(specs: tuple[ProcessSpec, ...]) -> dict[str, ProcessSpec]:
    return {spec.name: spec for spec in specs}


def specs_of(nodes: tuple[Kafka, ...]) -> tuple[ProcessSpec, ...]:
    return tuple(spec for node in nodes for spec in node.specs())


def cluster_ids(specs: tuple[ProcessSpec, ...]) -> set[str]:
    """The ids that the data folders of new nodes would be formatted with."""
    files = [Path(word[1:]) for spec in specs for word in spec.argv if word.startswith("@")]
    return {found for file in files for found in re.findall(r'"(--cluster-id=[^"]+)"', file.read_text())}


def test_one_node_keeps_one_copy_and_is_its_own_quorum(tmp_path: Path, ports: PortClaims, libs: Path) -> None:
    cluster = compose_kafka(tmp_path / "kafka", 1, ports, libs)
    (node,) = cluster
    specs = by_name(specs_of(cluster))
    assert list(specs) == ["kafka-format", "kafka"]
    assert specs["kafka"].depends_on == ("kafka-format",)
    assert f"-Xmx{HEAP}" in specs["kafka"].argv
    written = properties(node)
    assert written.items() >= BROKER_SETTINGS.items()
    assert written["controller.quorum.voters"] == f"1@127.0.0.1:{node.controller_port}"
    assert node.bootstrap_servers == f"127.0.0.1:{node.port}"


def test_a_node_uses_the_archive_of_its_jars_classes_if_there_is_one(
    tmp_path: Path, ports: PortClaims, libs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka, "DEFAULT_DATA_DIR", tmp_path)

    def archives() -> list[str]:
        specs = specs_of(compose_kafka(tmp_path / "kafka", 1, ports, libs))
        return [word for spec in specs for word in spec.argv if word.startswith("-XX:SharedArchiveFile=")]

    assert archives() == []
    archive = class_archive(find_java(), libs)
    archive.touch()
    assert archives() == 2 * [f"-XX:SharedArchiveFile={archive}"]
    (libs / "kafka_2.13-4.2.0.jar").write_text("another version")
    assert archives() == []


def test_nodes_that_are_compared_have_the_same_options_of_java(tmp_path: Path, ports: PortClaims, libs: Path) -> None:
    security = KafkaSecurity(Certificates(tmp_path / "ca.pem", tmp_path / "server.pem"), "password")

    def options(name: str, security: KafkaSecurity | None, *, both_compilers: bool = False) -> list[str]:
        nodes = compose_kafka(tmp_path / name, 1, ports, libs, security, both_compilers=both_compilers)
        return [word for word in by_name(specs_of(nodes))["kafka"].argv if word.startswith("-X")]

    secured = options("secured", security)
    assert secured == options("plaintext", None, both_compilers=True)
    assert options("default", None) == [FIRST_COMPILER, *secured]


def test_of_three_nodes_each_has_its_own_ports_data_and_log(three: tuple[Kafka, ...]) -> None:
    specs = by_name(specs_of(three))
    assert [spec for spec in specs if not spec.endswith("-format")] == ["kafka-1", "kafka-2", "kafka-3"]
    assert len({port for node in three for port in (node.port, node.controller_port)}) == 6
    written = [properties(node) for node in three]
    assert [found["node.id"] for found in written] == ["1", "2", "3"]
    assert len({found["log.dirs"] for found in written}) == 3
    for node, found in zip(three, written, strict=True):
        assert f"PLAINTEXT://127.0.0.1:{node.port}," in found["advertised.listeners"]
        assert found["log.dirs"].startswith(str(node.folder))


def test_three_nodes_are_one_quorum_and_keep_three_copies_two_of_them_in_sync(three: tuple[Kafka, ...]) -> None:
    specs = specs_of(three)
    voters = ",".join(f"{node.node_id}@127.0.0.1:{node.controller_port}" for node in three)
    for node in three:
        found = properties(node)
        assert found["controller.quorum.voters"] == voters
        assert found.items() >= REPLICATED_SETTINGS.items()
        factors = {name: value for name, value in found.items() if name.endswith("replication.factor")}
        assert len(factors) == 4
        assert set(factors.values()) == {"3"}
        in_sync = {name: value for name, value in found.items() if re.search(r"min\.(isr|insync\.replicas)$", name)}
        assert len(in_sync) == 3
        assert set(in_sync.values()) == {"2"}
    assert len(cluster_ids(specs)) == 1


def test_no_node_waits_for_another_one(three: tuple[Kafka, ...]) -> None:
    """They are ready together or not at all; each only waits until its own folder is formatted."""
    for name, spec in by_name(specs_of(three)).items():
        assert spec.depends_on == (() if name.endswith("-format") else (f"{name}-format",))


def test_the_memory_of_each_of_three_nodes_is_bounded(three: tuple[Kafka, ...]) -> None:
    heaps = [argument for spec in specs_of(three) for argument in spec.argv if argument.startswith("-Xmx")]
    assert heaps == ["-Xmx256m"] * 3


def test_nodes_that_a_killed_run_did_not_format_join_the_cluster_of_the_others(
    three: tuple[Kafka, ...], tmp_path: Path, ports: PortClaims, libs: Path
) -> None:
    first = specs_of(three)
    (three[0].folder / "formatted").touch()
    again = specs_of(compose_kafka(tmp_path / "kafka", 3, ports, libs))
    assert [spec.name for spec in again] == ["kafka-1", "kafka-2-format", "kafka-2", "kafka-3-format", "kafka-3"]
    assert cluster_ids(again) == cluster_ids(first)


def test_the_addresses_may_be_others_after_a_restart(tmp_path: Path, libs: Path) -> None:
    """Somebody else may have taken every port: nothing on disk but the properties file names one."""
    seen = set()
    for _ in range(2):
        claims = PortClaims()
        cluster = compose_kafka(tmp_path / "kafka", 3, claims, libs)
        specs_of(cluster)
        written = {properties(node)["controller.quorum.voters"] for node in cluster}
        assert len(written) == 1
        seen |= written
        claims.close()
    assert len(seen) == 2


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1)])
def test_data_of_another_number_of_brokers_are_refused(
    tmp_path: Path, ports: PortClaims, libs: Path, before: int, after: int
) -> None:
    folder = tmp_path / "kafka"
    for node in compose_kafka(folder, before, ports, libs):
        node.specs()
        (node.folder / "formatted").touch()
    with pytest.raises(StackError) as raised:
        compose_kafka(folder, after, ports, libs)
    assert str(raised.value) == (
        f"{folder} holds the data of {before} Kafka broker(s), not of {after}: choose another folder"
    )


@pytest.mark.parametrize("brokers", [-1, 0, 2, 4])
def test_another_number_of_brokers_is_refused(tmp_path: Path, ports: PortClaims, brokers: int) -> None:
    with pytest.raises(StackError, match=f"{brokers} Kafka brokers: there can be 1 or 3"):
        compose_kafka(tmp_path / "kafka", brokers, ports)


def test_every_node_belongs_to_the_part_and_nothing_else_does() -> None:
    assert {part_of(name) for brokers in (1, 3) for name in node_names(brokers)} == {"kafka"}
    others = ["kafka-1-format", "kafka-", "postgres", "consumer-kafka-1", "setup-topics"]
    assert [part_of(name) for name in others] == others


@pytest.mark.parametrize("brokers", [1, 3])
def test_the_password_of_a_secured_node_is_in_private_files_and_in_no_argument(
    tmp_path: Path, ports: PortClaims, libs: Path, brokers: int
) -> None:
    password = "planted-s3cret"
    security = KafkaSecurity(Certificates(tmp_path / "ca.pem", tmp_path / "server.pem"), password)
    nodes = compose_kafka(tmp_path / "kafka", brokers, ports, libs, security)
    specs = specs_of(nodes)
    assert len(specs) == 2 * brokers
    for spec in specs:
        shown = " ".join((*spec.argv, *spec.env.values()))
        assert password not in shown
        assert "saltedpassword" not in shown
    for node in nodes:
        holding = [file for file in node.folder.iterdir() if password in file.read_text()]
        assert [file.name for file in sorted(holding)] == ["format.arguments", "server.properties"]
        assert {file.stat().st_mode & 0o777 for file in holding} == {0o600}
    assert password not in repr(nodes)


@pytest.mark.parametrize("folder", ["", "kafka-2"])
def test_data_are_secured_or_not_for_ever(tmp_path: Path, folder: str) -> None:
    node = tmp_path / folder
    node.mkdir(exist_ok=True)
    assert not holds_data(tmp_path, secured=True)
    (node / "formatted").touch()
    assert holds_data(tmp_path, secured=False)
    with pytest.raises(StackError, match=f"^{node} holds the data of an unsecured Kafka: start it with --plaintext"):
        holds_data(tmp_path, secured=True)
    (node / "formatted").rename(node / "formatted-secured")
    assert holds_data(tmp_path, secured=True)
    with pytest.raises(StackError, match=f"^{node} holds the data of a secured Kafka: start it without --plaintext"):
        holds_data(tmp_path, secured=False)
