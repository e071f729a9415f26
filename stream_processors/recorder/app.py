"""Composition root of the recorder: reads the settings, wires the parts, runs until it is told to stop."""

from confluent_kafka import KafkaException

from fairlane import logs
from fairlane.postgres import describe
from fairlane.registry import codec_for
from fairlane.service import HealthServer, Readiness, StopSignal
from fairlane.settings import Settings
from stream_processors.recorder.recorder import CONDITIONS, Recorder
from stream_processors.recorder.retention import Retention
from stream_processors.recorder.source import Source
from stream_processors.recorder.store import Store

log = logs.get_logger(__name__)


def main() -> int:
    """Run a recorder in this process. Returns the exit status: 0 after a stop signal, 1 when it cannot go on."""
    settings = Settings()
    logs.configure(settings, "recorder")
    dsn = settings.postgres_dsn.get_secret_value()
    try:
        database = describe(dsn)
    except ValueError as error:
        log.error("recorder_failed", reason=f"POSTGRES_DSN: {error}")
        return 1
    stop = StopSignal()
    stop.install()
    readiness = Readiness(*CONDITIONS)
    health = HealthServer(readiness, settings.metrics_host, settings.metrics_port)
    health.start()
    recorder = Recorder(
        Source(settings),
        Store(dsn),
        codec_for(settings),
        readiness,
        batch_records=settings.recorder_batch_records,
        retention=Retention(settings.conversation_ttl_s),
    )
    log.info("recorder_started", database=database)
    try:
        recorder.run(lambda: stop.stopping)
    except KafkaException as error:
        log.error("recorder_failed", reason=error.args[0].str())
        return 1
    finally:
        health.stop()
    log.info("recorder_stopped")
    return 0
