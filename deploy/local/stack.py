"""The composition: which parts and services make a stack, in which order they start, with which addresses."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, Self

from deploy.local import kafka, postgres, probes, redis
from deploy.local.certificates import prepare_certificates
from deploy.local.kafka import ADMIN_USER, KafkaSecurity, compose_kafka, holds_data
from deploy.local.layout import (
    DEFAULT_DATA_DIR,
    KAFKA_LIBS_DIR,
    POSTGRES_OWNER_VARIABLE,
    POSTGRES_VARIABLE,
    POSTGRES_VARIABLES,
    DataDir,
    Endpoints,
    StackError,
)
from deploy.local.logs import LineSink
from deploy.local.ports import PortClaims
from deploy.local.postgres import OWNER_ROLE, Postgres
from deploy.local.redis import Redis
from deploy.local.run_record import acquire_lock, end_leftovers
from deploy.local.services import ADMIN, GATEWAY, HOST, Service, SetupStep
from deploy.local.supervisor import ProcessSpec, Reporter, Supervisor
from fairlane_server.access.credentials import (
    PASSWORD,
    credentials_file,
    has_credentials,
    keep_passwords,
    prepare_passwords,
    read_credentials,
)
from fairlane_server.postgres.rights import PostgresRole
from fairlane_server.processes.restarts import RestartPolicy

VARIABLES = {
    kafka.NAME: "KAFKA_BOOTSTRAP_SERVERS",
    postgres.NAME: POSTGRES_VARIABLE,
    redis.NAME: "REDIS_URL",
    redis.CACHE_NAME: "REDIS_CACHE_URL",
}
EXTERNAL_TIMEOUT_S = 5.0


class LocalStack:
    """A stack of real parts and our services on this machine.

        with LocalStack(data_dir=folder) as stack:
            use(stack.endpoints)

    A part whose variable (`KAFKA_BOOTSTRAP_SERVERS`, `POSTGRES_DSN`, `REDIS_URL`, `REDIS_CACHE_URL`) is set in
    `environ` is not started: the one at that address is used. `FILES_URL` likewise: otherwise files are kept in the
    data directory. `POSTGRES_DSN` is for every service but those whose role has a variable of its own, such as
    `POSTGRES_GATEWAY_DSN`.

    Args:
        data_dir: everything the stack writes is below it; one stack at a time.
        brokers: number of Kafka nodes, 1 or 3.
        secured: a Kafka of the stack's own asks for passwords, over TLS, and checks rights; a Redis of its own asks for
            passwords and checks rights; a Postgres of its own serves TLS alone. Every service and step acts as its
            ``user``, and on Redis as its ``redis_user``.
        both_compilers: Java runs Kafka with both of its compilers, as it does for a secured one anyway.
        setup: commands that must succeed before the services start.
        environ: where external parts are looked up; default: the process's environment.
        report: receives events.
        sink: receives every line of every log.
    """

    def __init__(
        self,
        *,
        data_dir: Path = DEFAULT_DATA_DIR,
        parts: Sequence[str] = tuple(VARIABLES),
        brokers: int = 1,
        secured: bool = False,
        both_compilers: bool = False,
        setup: Sequence[SetupStep] = (),
        services: Sequence[Service] = (),
        environ: Mapping[str, str] | None = None,
        report: Reporter | None = None,
        sink: LineSink | None = None,
        policy: RestartPolicy | None = None,
        kafka_libs: Path = KAFKA_LIBS_DIR,
    ) -> None:
        self.data_dir = DataDir(data_dir.resolve())
        self._parts = tuple(parts)
        self._brokers = brokers
        self._secured = secured
        self._both_compilers = both_compilers
        self._setup = tuple(setup)
        self._services = tuple(services)
        self._environ = os.environ if environ is None else environ
        self._report = report or (lambda _name, _message: None)
        self._sink = sink
        self._policy = policy
        self._kafka_libs = kafka_libs
        self._lock: BinaryIO | None = None
        self._ports: PortClaims | None = None
        self._endpoints: Endpoints | None = None
        self._supervisor: Supervisor | None = None

    @property
    def endpoints(self) -> Endpoints:
        """Known once `prepare` or `start` was called."""
        if self._endpoints is None:
            raise StackError("the stack has not been started")
        return self._endpoints

    @property
    def supervisor(self) -> Supervisor:
        """Known once `prepare` or `start` was called."""
        if self._supervisor is None:
            raise StackError("the stack has not been started")
        return self._supervisor

    def prepare(self) -> Supervisor:
        """Take the data directory, end what a crashed run left, choose ports, check external parts; starts nothing yet.
        Raises AlreadyRunningError: another supervisor holds the data directory. Raises StackError: something is missing
        or cannot be reached."""
        if sys.platform != "linux":
            raise StackError("the embedded stack runs on Linux only: use `docker compose up --build` elsewhere")
        self.data_dir.create()
        self._lock = acquire_lock(self.data_dir)
        try:
            for pid in end_leftovers(self.data_dir, (self.data_dir.postgres / "data",)):
                self._report("stack", f"ended process {pid}, left over from a run that crashed")
            self._ports = PortClaims(self.data_dir.ports_file)
            part_specs, self._endpoints = self._compose_parts(self._ports)
            specs = self._compose_services(part_specs, self._endpoints, self._ports)
            served = {service.name for service in self._services}
            gateway_url, admin_url = (
                f"http://{HOST}:{self._ports.take(_serving(name))}" if name in served else ""
                for name in (GATEWAY, ADMIN)
            )
            self._endpoints = replace(self._endpoints, gateway_url=gateway_url, admin_url=admin_url)
            self._endpoints.save(self.data_dir.endpoints_file)
            self._supervisor = Supervisor(
                specs,
                log_dir=self.data_dir.logs,
                processes_file=self.data_dir.processes_file,
                policy=self._policy,
                report=self._report,
                sink=self._sink,
            )
        except BaseException:
            self._release()
            raise
        return self._supervisor

    def start(self) -> Self:
        """Start everything and wait until it is ready. Raises StackError: it cannot be started; nothing of it runs any
        more."""
        supervisor = self._supervisor or self.prepare()
        try:
            supervisor.start()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Stop everything that was started, and nothing else; may be called more than once."""
        if self._supervisor is not None:
            self._supervisor.stop()
        self._release()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_error: object) -> None:
        self.stop()

    def _release(self) -> None:
        if self._lock is not None:
            self.data_dir.endpoints_file.unlink(missing_ok=True)
            self._lock.close()
            self._lock = None
        if self._ports is not None:
            self._ports.close()

    def _compose_parts(self, ports: PortClaims) -> tuple[tuple[ProcessSpec, ...], Endpoints]:
        specs: list[ProcessSpec] = []
        kafka_servers = postgres_owner_dsn = redis_url = redis_cache_url = ""
        postgres_dsns: dict[PostgresRole, str] = {}
        security: KafkaSecurity | None = None
        allow_open_kafka = ""
        if kafka.NAME in self._parts and not (kafka_servers := self._external(kafka.NAME)):
            is_new = not holds_data(self.data_dir.kafka, secured=self._secured)
            security = self._kafka_security(is_new=is_new) if self._secured else None
            # No node waits for another one: none is ready before most of them run.
            nodes = compose_kafka(
                *(self.data_dir.kafka, self._brokers, ports, self._kafka_libs, security),
                both_compilers=self._both_compilers,
            )
            specs += [spec for node in nodes for spec in node.specs()]
            kafka_servers = ",".join(node.bootstrap_servers for node in nodes)
            allow_open_kafka = "" if self._secured else "true"
        if postgres.NAME in self._parts:
            if shared_dsn := self._external(postgres.NAME):
                postgres_owner_dsn = self._environ.get(POSTGRES_OWNER_VARIABLE) or shared_dsn
                postgres_dsns = {
                    role: self._environ.get(name) or shared_dsn for role, name in POSTGRES_VARIABLES.items()
                }
            else:
                certificates = prepare_certificates(self.data_dir.certificates) if self._secured else None
                server = Postgres(self.data_dir.postgres, ports.take("postgres"), certificates)
                specs += server.specs()
                postgres_owner_dsn = server.dsn(OWNER_ROLE)
                postgres_dsns = {role: server.dsn(role.name_in()) for role in POSTGRES_VARIABLES}
        has_own_redis = not any(self._environ.get(VARIABLES[part]) for part in (redis.NAME, redis.CACHE_NAME))
        redis_credentials = self.data_dir.credentials if self._secured and has_own_redis else None
        if redis.NAME in self._parts and not (redis_url := self._external(redis.NAME)):
            state = Redis(self.data_dir.root / redis.NAME, ports.take(redis.NAME), credentials=redis_credentials)
            specs.append(state.spec())
            redis_url = state.url
        if redis.CACHE_NAME in self._parts and not (redis_cache_url := self._external(redis.CACHE_NAME)):
            folder = self.data_dir.root / redis.CACHE_NAME
            cache = Redis(folder, ports.take(redis.CACHE_NAME), redis.CACHE_NAME, redis_credentials)
            specs.append(cache.spec())
            redis_cache_url = cache.url
        endpoints = Endpoints(
            kafka_servers,
            postgres_owner_dsn,
            redis_url,
            files_url=self._files_url(),
            redis_cache_url=redis_cache_url,
            postgres_dsns=postgres_dsns,
            allow_open_kafka=allow_open_kafka,
            redis_credentials="" if redis_credentials is None else str(redis_credentials),
        )
        if security is not None:
            ca_file, credentials = security.certificates.ca_file, self.data_dir.credentials
            endpoints = replace(endpoints, kafka_ca_file=str(ca_file), kafka_credentials=str(credentials))
        return tuple(specs), endpoints

    def _kafka_security(self, *, is_new: bool) -> KafkaSecurity:
        """Certificates and passwords of every user that the stack itself needs. Those of users that exist are taken
        from their files, others made; of a new Kafka none exists. Raises StackError: a file with a password is broken,
        or ADMIN_USER's is gone."""
        users = {service.user for service in self._services} | {step.user for step in self._setup} | {ADMIN_USER}
        folder = self.data_dir.credentials
        try:
            if not is_new:
                # Its creation was the formatting of the data.
                keep_passwords(folder, [ADMIN_USER])
                if not has_credentials(folder, ADMIN_USER):
                    raise StackError(
                        f"{self.data_dir.kafka} holds the data of a secured Kafka, but "
                        f"{credentials_file(folder, ADMIN_USER)} is gone: bring it back, or choose another folder"
                    )
                users = {user for user in users if not has_credentials(folder, user)}
            prepare_passwords(folder, sorted(users - {""}))
            password = read_credentials(folder, ADMIN_USER)[PASSWORD]
        except (OSError, ValueError) as error:
            raise StackError(str(error)) from None
        return KafkaSecurity(prepare_certificates(self.data_dir.certificates), password)

    def _compose_services(
        self, part_specs: Sequence[ProcessSpec], endpoints: Endpoints, ports: PortClaims
    ) -> tuple[ProcessSpec, ...]:
        specs = list(part_specs)
        for step in self._setup:
            specs.append(step.spec(endpoints, [spec.name for spec in specs]))
        before = [spec.name for spec in specs]
        services = (
            service.spec(
                endpoints,
                ports.take(service.name),
                before,
                None if service.port_variable is None else ports.take(_serving(service.name)),
            )
            for service in self._services
        )
        return (*specs, *services)

    def _files_url(self) -> str:
        """Absolute: jobs store it, and a runner may have another working directory."""
        given = self._environ.get("FILES_URL", "")
        if "://" in given:
            return given
        return str(Path(given).resolve() if given else self.data_dir.files)

    def _external(self, part: str) -> str:
        """The address of an external part, empty if there is none. Raises StackError: it is not usable."""
        variable = VARIABLES[part]
        address = self._environ.get(variable, "")
        if address and (problem := self._check(part, address)):
            raise StackError(f"{variable} is set, but that {part} cannot be used: {problem}")
        return address

    def _check(self, part: str, address: str) -> str | None:
        if part == postgres.NAME:
            return probes.postgres(address, EXTERNAL_TIMEOUT_S)
        if part in {redis.NAME, redis.CACHE_NAME}:
            return probes.redis(address, EXTERNAL_TIMEOUT_S)
        if self._environ.get("KAFKA_SECURITY_PROTOCOL", "PLAINTEXT") == "PLAINTEXT":
            return probes.kafka(address, EXTERNAL_TIMEOUT_S)
        # Whether it lets us in is seen by the first step that uses it, which has the credentials.
        problems = [probes.tcp(host, port, EXTERNAL_TIMEOUT_S) for host, port in probes.split_addresses(address)]
        return None if None in problems else "; ".join(problem for problem in problems if problem)


def kafka_credentials(data_dir: Path, environ: Mapping[str, str] | None = None) -> Path | None:
    """Folder of the users of a secured stack's Kafka; None if the stack is to use a Kafka of others."""
    given = (os.environ if environ is None else environ).get(VARIABLES[kafka.NAME])
    return None if given else DataDir(data_dir.resolve()).credentials


def _serving(service: str) -> str:
    """What the port that a service serves on is claimed as."""
    return f"{service}-http"
