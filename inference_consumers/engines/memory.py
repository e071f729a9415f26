"""Check before loading that a model's weights fit into memory."""

from pathlib import Path

import psutil
import torch

from inference_consumers.engines.protocol import EngineLoadError

_CGROUP = Path("/sys/fs/cgroup")
_GIB = 1 << 30


def check_memory(model: str, path: Path, needed_bytes: int, device: torch.device) -> None:
    """Raises EngineLoadError, with both figures, when the machine or the device has less than the weights need."""
    places = {"this machine": main_memory_bytes()}
    if device.type == "cuda":
        places[str(device)] = torch.cuda.mem_get_info(device)[0]
    for place, free_bytes in places.items():
        if needed_bytes > free_bytes:
            raise EngineLoadError(
                f"{model}: {path}: the weights need {needed_bytes / _GIB:.2f} GiB of memory; "
                f"{place} has {free_bytes / _GIB:.2f} GiB left"
            )


def main_memory_bytes(cgroup: Path = _CGROUP) -> int:
    """Bytes that this process may still allocate: the machine's, or its container's if less."""
    free = int(psutil.virtual_memory().available)
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
        cached = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return free
    if limit == "max":
        return free
    # The kernel gives up cached files before it ends a process.
    return max(0, min(free, int(limit) - used + int(cached.get("inactive_file", 0))))
