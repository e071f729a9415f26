"""Number of CPU threads of torch."""

import torch


def use_threads(threads: int) -> None:
    """Set the threads of this process; 0 leaves the choice, one per core, to torch."""
    if threads > 0:
        torch.set_num_threads(threads)
