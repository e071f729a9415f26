"""Archive the classes that Kafka loads, so that its nodes start faster (class data sharing of the JVM).

`python -m deploy.local.kafka_classes` is a step of `make install`.
"""

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from deploy.local.kafka import ARCHIVE_PREFIX, Kafka, class_archive, find_java
from deploy.local.layout import KAFKA_LIBS_DIR
from deploy.local.ports import PortClaims
from deploy.local.supervisor import Supervisor

_DUMP_TIMEOUT_S = 120


def archive_classes() -> None:
    """Make the archive for this Java and these jars, unless it exists, and remove those for others.

    Raises:
        StackError: Java or the jars are missing, or a node does not start.
    """
    archive = class_archive(find_java(), KAFKA_LIBS_DIR)
    if archive.exists():
        return
    for old in archive.parent.glob(f"{ARCHIVE_PREFIX}*.jsa"):
        old.unlink(missing_ok=True)
    # In the folder of the archive: it is moved into place whole.
    with (
        TemporaryDirectory(prefix=ARCHIVE_PREFIX, dir=archive.parent) as name,
        closing(PortClaims()) as ports,
    ):
        folder = Path(name)
        draft = folder / "draft.jsa"
        *format_data, node = Kafka(folder, ports.take("kafka"), ports.take("controller")).specs()
        # A node writes the archive when it ends.
        node = replace(
            node, env={"JDK_JAVA_OPTIONS": f"-XX:ArchiveClassesAtExit={draft}"}, stop_timeout_s=_DUMP_TIMEOUT_S
        )
        with Supervisor((*format_data, node), log_dir=folder, processes_file=folder / "processes.json"):
            pass
        # Java warns and goes on where it can write none.
        if draft.exists():
            draft.replace(archive)


if __name__ == "__main__":
    archive_classes()
