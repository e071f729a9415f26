"""Windows over the tokens of texts that are longer than what is looked at in one go."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Window:
    """``text`` is the text's place in the list; [start, end) are characters of it."""

    text: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class WindowSize:
    """In tokens, without those that mark begin and end. ``overlap`` tokens are shared with the window before."""

    tokens: int
    overlap: int

    def __post_init__(self) -> None:
        if not 0 <= self.overlap < self.tokens:
            raise ValueError(f"windows of {self.tokens} tokens cannot overlap by {self.overlap}")

    def cut(self, count: int) -> list[tuple[int, int]]:
        """[first, last) of each window over ``count`` tokens: every token is in one, and the last window is full
        unless it is the only one."""
        if count <= self.tokens:
            return [(0, count)] if count else []
        starts = range(0, count - self.tokens, self.tokens - self.overlap)
        return [*((start, start + self.tokens) for start in starts), (count - self.tokens, count)]
