"""Classification of an engine's exceptions by cause. Pure, and without importing the libraries that raise them."""

from inference_consumers.engines.protocol import EngineGoneError, Problem, TransientEngineError

# torch's own by name: this process may serve no torch engine, and importing torch takes seconds.
_OUT_OF_MEMORY = frozenset({"MemoryError", "OutOfMemoryError"})
# On the CPU torch raises a plain RuntimeError.
_TORCH_CPU_OUT_OF_MEMORY = "DefaultCPUAllocator: can't allocate memory"
_BROKEN_DEVICE = frozenset({"AcceleratorError", "EngineDeadError"})


def problem_of(error: BaseException) -> Problem:
    """The problem without the exception's text, which may quote a prompt."""
    return Problem(
        type(error).__name__,
        out_of_memory=is_out_of_memory(error),
        transient=isinstance(error, TransientEngineError),
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an engine failed because it had not enough memory, of its device or of its machine."""
    if any(kind.__name__ in _OUT_OF_MEMORY for kind in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError) and _TORCH_CPU_OUT_OF_MEMORY in str(error)


def is_end_of_engine(error: BaseException) -> bool:
    """Whether the process can run nothing any more: an error of a CUDA kernel leaves its context unusable."""
    if isinstance(error, EngineGoneError):
        return True
    if is_out_of_memory(error):
        return False
    if any(kind.__name__ in _BROKEN_DEVICE for kind in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError) and str(error).startswith("CUDA error")


def name_of_end(error: BaseException) -> str:
    """The type of what the engine ended by, for ``engine_ends.end_by_error``."""
    cause = error.__cause__ if isinstance(error, EngineGoneError) else None
    return type(cause or error).__name__
