"""Composition root of the process that ingests tenants' documents."""

from contextlib import closing

from fairlane import logs
from fairlane.settings import Settings
from fairlane_server.postgres.connection import describe
from fairlane_server.processes.service import HealthServer, Readiness, StopSignal
from fairlane_server.processes.start import begin_service
from fairlane_server.retrieval.embedder import Embedder, EmbedderError
from fairlane_server.retrieval.embedders import embedder_for
from fairlane_server.retrieval.parsers import DocumentLimits
from fairlane_server.retrieval.pgvector_store import PgVectorCollections
from producers.backfill.errors import JobFailedError, UnavailableError
from producers.ingest.ingester import Ingester, IngestPolicy, SharedEmbedder
from producers.ingest.service import CONDITIONS, POSTGRES, IngestService
from producers.ingest.work_store import WorkStore

log = logs.get_logger(__name__)

EMBEDDER = "embedder"
_ANNOUNCE_AGAIN_S = 2.0
_LOAD_AGAIN_S = 10.0


def policy_of(settings: Settings) -> IngestPolicy:
    """How documents are ingested."""
    limits = DocumentLimits(
        max_file_bytes=settings.gateway_max_document_bytes,
        max_parse_s=settings.ingest_max_parse_s,
        max_parser_bytes=settings.ingest_max_parser_bytes,
    )
    return IngestPolicy(settings.files_url, settings.documents_max_passages, limits)


def main() -> int:
    """Run until a stop signal. Returns the exit status: 0 after one, 1 for settings that it cannot run with."""
    settings = Settings()
    begin_service(settings, "ingest")
    dsn = settings.postgres_dsn.get_secret_value()
    try:
        database = describe(dsn)
    except ValueError as error:
        log.error("ingest_failed", reason=str(error))
        return 1
    stop = StopSignal()
    stop.install()
    readiness = Readiness(*CONDITIONS)
    health = HealthServer(readiness, settings.metrics_host, settings.metrics_port)
    health.start()
    log.info("ingest_started", database=database)
    try:
        embedder = _loaded(settings, stop, readiness)
        if embedder is not None:
            with closing(embedder):
                _serve(settings, embedder, stop, readiness)
    finally:
        health.stop()
    log.info("ingest_stopped")
    return 0


def _loaded(settings: Settings, stop: StopSignal, readiness: Readiness) -> Embedder | None:
    """The embedder; None when the process is to end before there is one. Like a dispatcher, the process is ready
    without: documents wait for it."""
    while not stop.stopping:
        try:
            embedder = embedder_for(settings)
        except EmbedderError as error:
            readiness.set(POSTGRES)
            readiness.degrade(EMBEDDER, str(error))
            log.warning("embedder_not_loaded", reason=str(error))
            stop.wait(_LOAD_AGAIN_S)
        else:
            readiness.degrade(EMBEDDER, None)
            return embedder
    return None


def _serve(settings: Settings, embedder: Embedder, stop: StopSignal, readiness: Readiness) -> None:
    dsn, policy, shared = settings.postgres_dsn.get_secret_value(), policy_of(settings), SharedEmbedder(embedder)
    store = WorkStore(dsn)
    while not stop.stopping:
        try:
            store.announce(embedder)
            break
        except (UnavailableError, JobFailedError) as error:
            readiness.set(POSTGRES, str(error))
            log.warning("embedder_not_announced", reason=str(error))
            stop.wait(_ANNOUNCE_AGAIN_S)
    lanes = [
        Ingester(WorkStore(dsn), PgVectorCollections(dsn), shared, policy) for _ in range(settings.ingest_concurrency)
    ]
    IngestService(store, lanes, settings.files_url, stop, readiness, leave_s=settings.drain_timeout_s).run()
