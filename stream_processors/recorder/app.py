"""Composition root of the recorder: reads the settings, wires the parts, runs until a stop signal."""

from confluent_kafka import KafkaException

from fairlane import logs
from fairlane.money import NANOS_PER_UNIT
from fairlane.schema_registry import codec_for
from fairlane.settings import Settings
from fairlane_server.postgres.connection import describe
from fairlane_server.processes.garbage_collection import collect_less_often
from fairlane_server.processes.service import HealthServer, Readiness, StopSignal
from fairlane_server.processes.start import begin_service
from stream_processors.recorder.drift_watch import DriftWatch, rules_of_drift
from stream_processors.recorder.evaluation_watch import EvaluationWatch
from stream_processors.recorder.feedback_watch import FeedbackWatch
from stream_processors.recorder.label_collector import LabelCollector
from stream_processors.recorder.label_sources import WorkItemLog
from stream_processors.recorder.recorder import CONDITIONS, Recorder
from stream_processors.recorder.retention import OldRows, Removal, rules_of
from stream_processors.recorder.source import LogConsumer
from stream_processors.recorder.spend_watch import SpendWatch
from stream_processors.recorder.store import RecorderStore
from stream_processors.recorder.watch import Watch

log = logs.get_logger(__name__)


def main() -> int:
    """Run a recorder in this process. Returns the exit status: 0 after a stop signal, 1 when it cannot go on."""
    settings = Settings()
    begin_service(settings, "recorder")
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
    rules = rules_of(settings)
    failures: list[BaseException] = []
    removal = Removal(OldRows(dsn), rules, failures.append)
    codec = codec_for(settings)
    watches: list[Watch] = [
        SpendWatch(dsn, settings.spend_anomaly_least * NANOS_PER_UNIT, failures.append),
        FeedbackWatch(dsn, failures.append),
        EvaluationWatch(dsn, failures.append),
        LabelCollector(settings, WorkItemLog(settings, codec), failures.append),
    ]
    if (drift_rules := rules_of_drift(settings)) is not None:
        watches.append(DriftWatch(settings, drift_rules, WorkItemLog(settings, codec), failures.append))
    recorder = Recorder(
        LogConsumer(settings),
        RecorderStore(dsn),
        codec,
        readiness,
        batch_records=settings.recorder_batch_records,
        retention=rules,
    )
    log.info("recorder_started", database=database)
    removal.start()
    for watch in watches:
        watch.start()
    collect_less_often()
    try:
        recorder.run(lambda: stop.stopping or bool(failures))
    except KafkaException as error:
        log.error("recorder_failed", reason=error.args[0].str())
        return 1
    finally:
        removal.stop()
        for watch in watches:
            watch.stop()
        health.stop()
    if failures:
        log.error("recorder_failed", reason=str(failures[0]), kind=type(failures[0]).__name__)
        return 1
    log.info("recorder_stopped")
    return 0
