"""TLS in docker-compose.yml: who has which certificate, and that nothing that holds data is reached without."""

import os
import re
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import pytest
from cryptography import x509

from deploy import certificates
from deploy.local.layout import PROJECT_ROOT
from deploy.local.redis import SETTINGS as REDIS_SERVERS
from tests.contract.compose_file import ComposeService, compose, dockerfile, services

SERVERS = ("kafka", "postgres", "redis", "redis-cache")
AUTHORITY = "authority"
MAKER = services()["certificates"]
OWN = [service for service in services().values() if service.is_ours and service is not MAKER]

each_of_own = pytest.mark.parametrize("service", OWN, ids=lambda service: service.name)
each_server = pytest.mark.parametrize("name", SERVERS)


def folder_of(service: ComposeService, volume: str) -> str:
    """Where a volume is mounted."""
    (target,) = (target for target, source in service.mounts.items() if source == volume)
    return target


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the container makes, with its own command."""
    folder = tmp_path_factory.mktemp("certificates")
    module, mounted, *names = MAKER.python_commands[0][1:]
    assert (module, mounted) == ("deploy.certificates", "/certificates")
    assert certificates.main([str(folder), *names]) == 0
    return folder


def test_the_container_makes_an_authority_and_a_certificate_for_each_server_in_volumes_of_their_own(made: Path) -> None:
    files = {str(file.relative_to(made)) for file in made.rglob("*") if file.is_file()}
    assert files == {"authority/ca.pem", *(f"{name}/server.pem" for name in SERVERS)}
    assert MAKER.mounts == {
        f"/certificates/{name}": AUTHORITY if name == AUTHORITY else f"{name}-certificates"
        for name in (AUTHORITY, *SERVERS)
    }
    # The folders of the image have the owner that writes into the volumes.
    (created,) = (arguments for name, arguments in dockerfile() if name == "RUN" and "trustme" in arguments)
    assert set(MAKER.mounts) <= set(created.partition("install -d -o fairlane -g fairlane ")[2].split())


@each_server
def test_a_certificate_has_the_names_that_clients_connect_to(made: Path, name: str) -> None:
    text = (made / name / "server.pem").read_text(encoding="utf-8")
    found = x509.load_pem_x509_certificate(text[text.index("-----BEGIN CERTIFICATE") :].encode())
    names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [name, "localhost"]
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1"]
    assert text.startswith("-----BEGIN PRIVATE KEY-----")
    authority = x509.load_pem_x509_certificate((made / AUTHORITY / "ca.pem").read_bytes())
    found.verify_directly_issued_by(authority)


def test_certificates_are_made_once_and_all_anew_if_one_is_missing(tmp_path: Path) -> None:
    def content() -> dict[str, str]:
        return {str(file): file.read_text() for file in sorted(tmp_path.rglob("*.pem"))}

    assert certificates.make(tmp_path, SERVERS)
    first = content()
    assert not certificates.make(tmp_path, SERVERS)
    assert content() == first
    (tmp_path / "redis" / "server.pem").unlink()
    assert certificates.make(tmp_path, SERVERS)
    second = content()
    assert second.keys() == first.keys()
    assert not set(second.values()) & set(first.values())


def test_servers_of_other_users_can_read_their_file(made: Path) -> None:
    for file in made.rglob("*.pem"):
        assert os.stat(file).st_mode & 0o777 == 0o644  # noqa: PTH116 - the mode alone


@each_server
def test_the_key_of_a_server_is_mounted_by_itself_alone_and_it_waits_for_it(name: str) -> None:
    volume = f"{name}-certificates"
    users = {service.name for service in services().values() if volume in service.mounts.values()}
    assert users == {MAKER.name, name}
    assert f"{volume}:{folder_of(services()[name], volume)}:ro" in services()[name].raw["volumes"]
    assert services()[name].raw["depends_on"][MAKER.name] == {"condition": "service_completed_successfully"}
    assert volume in compose()["volumes"]


def test_everybody_but_the_maker_only_reads_the_authority() -> None:
    for service in services().values():
        if AUTHORITY in service.mounts.values() and service is not MAKER:
            assert f"{AUTHORITY}:{folder_of(service, AUTHORITY)}:ro" in service.raw["volumes"], service.name


@each_of_own
def test_every_client_verifies_with_the_authority_that_it_has_mounted(service: ComposeService) -> None:
    environment = service.environment
    trusted = []
    if "KAFKA_BOOTSTRAP_SERVERS" in environment:
        assert environment["KAFKA_SECURITY_PROTOCOL"] == "SASL_SSL"
        trusted.append(environment["KAFKA_SSL_CA_FILE"])
    for name in ("POSTGRES_DSN", "POSTGRES_OWNER_DSN"):
        if name in environment:
            options = dict(parse_qsl(urlsplit(environment[name]).query))
            assert options["sslmode"] == "verify-full", name
            trusted.append(options["sslrootcert"])
    for name in ("REDIS_URL", "REDIS_CACHE_URL"):
        if name in environment:
            assert environment[name].startswith("rediss://"), name
            trusted.append(dict(parse_qsl(urlsplit(environment[name]).query))["ssl_ca_certs"])
    if trusted:
        assert set(trusted) == {f"{folder_of(service, AUTHORITY)}/ca.pem"}
    else:
        assert service.name == "models"


def test_no_address_without_tls_is_left() -> None:
    """But of HTTP: the registry, the pages for people, and metrics."""
    files = [PROJECT_ROOT / "docker-compose.yml", *sorted((PROJECT_ROOT / "deploy" / "kafka").glob("*.properties"))]
    for file in files:
        assert not re.search(r"PLAINTEXT|\bredis://|sslmode=(?!verify-full)", file.read_text(encoding="utf-8")), file


def test_java_clients_trust_the_authority_alone_and_check_the_name() -> None:
    for name, path, prefix in (
        ("kafka", "/etc/kafka/admin.properties", ""),
        ("setup-registry", "/etc/kafka/admin.properties", ""),
        ("schema-registry", "/etc/registry/kafka.properties", "apicurio.kafka.common."),
    ):
        service = services()[name]
        lines = (PROJECT_ROOT / service.mounts[path]).read_text(encoding="utf-8").splitlines()
        found = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
        assert found[f"{prefix}security.protocol"] == "SASL_SSL"
        assert found[f"{prefix}ssl.truststore.type"] == "PEM"
        assert found[f"{prefix}ssl.truststore.location"] == f"{folder_of(service, AUTHORITY)}/ca.pem"
        # Kafka's own default.
        assert found.get(f"{prefix}ssl.endpoint.identification.algorithm", "" if prefix else "https") == "https"
    viewer = services()["kafka-ui"]
    properties = "KAFKA_CLUSTERS_0_PROPERTIES_"
    assert viewer.environment[f"{properties}SECURITY_PROTOCOL"] == "SASL_SSL"
    assert viewer.environment[f"{properties}SSL_TRUSTSTORE_TYPE"] == "PEM"
    assert viewer.environment[f"{properties}SSL_TRUSTSTORE_LOCATION"] == f"{folder_of(viewer, AUTHORITY)}/ca.pem"


def test_the_broker_has_its_key_and_the_authority_from_its_volumes() -> None:
    kafka = services()["kafka"]
    for name, file in ((AUTHORITY, "ca.pem"), ("kafka-certificates", "server.pem")):
        kind = "TRUSTSTORE" if name == AUTHORITY else "KEYSTORE"
        assert kafka.environment[f"KAFKA_SSL_{kind}_TYPE"] == "PEM"
        assert kafka.environment[f"KAFKA_SSL_{kind}_LOCATION"] == f"{folder_of(kafka, name)}/{file}"


@pytest.mark.parametrize("name", REDIS_SERVERS)
def test_redis_listens_with_tls_alone(name: str) -> None:
    redis = services()[name]
    script = " ".join(redis.raw["command"][-1].replace("\\\n", " ").split())
    file = f"{folder_of(redis, f'{name}-certificates')}/server.pem"
    wanted = f"--port 0 --tls-port 6379 --tls-cert-file {file} --tls-key-file {file} --tls-auth-clients no <<"
    assert wanted in script
    check = redis.raw["healthcheck"]["test"][-1]
    assert check.startswith(f"redis-cli --tls --cacert {folder_of(redis, AUTHORITY)}/ca.pem ")


def test_postgres_serves_nobody_without_tls_over_a_network() -> None:
    postgres = services()["postgres"]
    assert postgres.raw["entrypoint"] == ["sh", "-ec"]
    (script,) = postgres.raw["command"]
    options = dict(re.findall(r"-c (\w+)=(\S+)", script))
    assert options["ssl"] == "on"
    rules = (PROJECT_ROOT / postgres.mounts[options["hba_file"]]).read_text(encoding="utf-8").splitlines()
    kinds = {rule.split()[0] for rule in rules if not rule.startswith("#")}
    assert kinds == {"local", "hostssl"}
    (copied,) = (line.split() for line in script.splitlines() if line.startswith("install "))
    assert copied[1:] == [
        *("-o", "postgres", "-g", "postgres", "-m", "600"),
        f"{folder_of(postgres, 'postgres-certificates')}/server.pem",
        options["ssl_key_file"],
    ]
    assert options["ssl_cert_file"] == options["ssl_key_file"]
