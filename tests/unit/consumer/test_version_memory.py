"""What a version will need, by what was measured of another, and whether that fits."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from inference_consumers.engine_process.process_facts import held_bytes
from inference_consumers.engines.protocol import EngineMemory
from inference_consumers.versions.measurement import MemoryBook, folder_bytes
from inference_consumers.versions.memory import FreeMemory, Memory, fits, larger, predicted
from tests.kit.version_kit import MODEL, version

SIZES = st.integers(0, 1 << 40)
MIB = 1 << 20


@given(held=SIZES, device=SIZES, old=SIZES, new=st.none() | SIZES)
def test_a_prediction_is_at_least_what_was_measured_and_grows_with_the_files(
    held: int, device: int, old: int, new: int | None
) -> None:
    found = predicted(Memory(held, device), old, new)
    assert found.main_bytes >= held
    assert found.device_bytes >= device
    if new is None or new <= old:
        assert found == Memory(held, device)
    else:
        assert found.main_bytes - held <= 8 * (new - old)
        assert found.main_bytes <= predicted(Memory(held, device), old, new + 1).main_bytes


def test_a_small_file_that_doubles_does_not_double_the_process() -> None:
    assert predicted(Memory(300 * MIB), MIB, 2 * MIB).main_bytes == 308 * MIB
    assert predicted(Memory(2_000 * MIB), 1_000 * MIB, 2_000 * MIB).main_bytes == 4_000 * MIB


def test_what_fits_leaves_the_reserve() -> None:
    assert fits(Memory(60), FreeMemory(100), 40)
    assert not fits(Memory(61), FreeMemory(100), 40)
    assert fits(Memory(161), FreeMemory(100), 40, without=[Memory(101)])
    assert fits(Memory(0, 60), FreeMemory(100, 100), 40)
    assert not fits(Memory(0, 61), FreeMemory(100, 100), 40)
    assert fits(Memory(0, 61), FreeMemory(100, 100), 40, without=[Memory(0, 1)])
    assert fits(Memory(0, 61), FreeMemory(100), 40), "nothing is known of a GPU"


def test_of_those_that_fill_a_gpu_there_is_one() -> None:
    whole = Memory(10, 0, fills_device=True)
    assert fits(whole, FreeMemory(100, 0), 0)
    assert fits(whole, FreeMemory(100, 0), 0, beside=[Memory(10)])
    assert not fits(whole, FreeMemory(100), 0, beside=[whole])
    assert larger(Memory(1, 5), Memory(3, 2, fills_device=True)) == Memory(3, 5, fills_device=True)


class Engines:
    """Two loaded versions, whose processes hold so much now."""

    def __init__(self, path: Path, **held: int) -> None:
        self._hosts = {
            (MODEL.model, name): SimpleNamespace(held_bytes=size, spec=SimpleNamespace(path=path))
            for name, size in held.items()
        }

    @property
    def hosts(self) -> list[Any]:
        return list(self._hosts.values())

    def host(self, key: tuple[str, str]) -> Any:
        return self._hosts[key]


def test_the_book_predicts_from_a_version_of_the_same_model(tmp_path: Path) -> None:
    (tmp_path / MODEL.path).mkdir()
    (tmp_path / MODEL.path / "weights").write_bytes(bytes(1_000))
    engines: Any = Engines(tmp_path / MODEL.path, v1=900)
    book = MemoryBook(tmp_path, None, 0, free_main_bytes=lambda: 5_000)
    assert book.needed(version("v2")) is None
    book.measured((MODEL.model, "v1"), EngineMemory(800, 70, 400), engines)
    assert book.needed(version("v2")) == Memory(800, 70)
    assert book.needed(version("v2", "other")) is None
    assert book.free(engines) == FreeMemory(5_000, 400)
    book.released((MODEL.model, "v1"))
    assert book.free(engines) == FreeMemory(5_000, 470)
    assert book.needed(version("v2")) == Memory(800, 70), "measured once, known from then on"


def test_a_version_without_room_needs_more_than_there_was(tmp_path: Path) -> None:
    engines: Any = Engines(tmp_path, v1=900)
    book = MemoryBook(tmp_path, 1_500, 100, free_main_bytes=lambda: 5_000)
    assert book.free(engines) == FreeMemory(600), "the bound on all engines counts"
    assert book.held((MODEL.model, "v1"), engines) == Memory(900)
    assert book.begin(version("v2"), engines) == (None, 600)
    assert not book.lacks_room(engines)
    book.found_no_room((MODEL.model, "v2"))
    assert book.needed(version("v2")) == Memory(601)
    full: Any = Engines(tmp_path, v1=900, v2=501)
    assert book.lacks_room(full)


def test_memory_of_a_family_of_processes_is_its_share_of_their_pages(tmp_path: Path) -> None:
    for pid, pss_kib, children in (("7", 100, "8 9"), ("8", 20, ""), ("9", None, "")):
        (tmp_path / pid / "task" / pid).mkdir(parents=True)
        (tmp_path / pid / "task" / pid / "children").write_text(children)
        if pss_kib is not None:
            (tmp_path / pid / "smaps_rollup").write_text(f"Rss: 999 kB\nPss:   {pss_kib} kB\nPss_Dirty: 1 kB\n")
    (tmp_path / "9" / "statm").write_text("10 2 1 0 0 0 0")
    assert held_bytes(7, tmp_path) == 120 * 1024 + 2 * 4096
    assert held_bytes(1, tmp_path) == 0
    assert folder_bytes(tmp_path / "none") == 0
