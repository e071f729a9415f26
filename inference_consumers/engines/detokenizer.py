"""Incremental detokenizer: pieces of text that later tokens do not change."""

from collections.abc import Callable, Sequence

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# The longest beginning of a character in UTF-8 has three bytes; some decoders put a replacement for each.
_MOST_UNSURE = 3
# A window may begin so many tokens back, inside a character perhaps: its end reads the same.
_SURE_TOKENS = 12
_LONGEST_WINDOW = 24


class Detokenizer:
    """Decodes a few tokens at each step, not all of them, so that a token's cost does not grow with the text.

    The method is that of text-generation-inference (``Model.decode_token``) and vLLM (``detokenize_incrementally``):
    the tokens since the last piece are decoded together with those of that piece, because a decoder may treat what
    comes first differently, and text that ends in a replacement character waits for the rest of it. Beyond theirs, a
    run of replacement characters is told but for its end, so that a model which writes nothing else holds up nothing.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        """``decode`` turns token ids into text, with a replacement character for bytes that are none."""
        self._decode = decode
        self._window: list[int] = []
        self._fresh = 0  # where in the window the tokens begin that came since the last piece
        self._told = ""  # what is told of the window's text

    def add(self, token_id: int) -> str:
        """The text that is certain now and was not before. What is never certain ends in half a character."""
        self._window.append(token_id)
        text = self._decode(self._window)
        sure = _sure(text)
        piece = sure[len(self._told) :]
        if piece and sure == text:
            self._window = self._window[self._fresh :]
            self._fresh = len(self._window)
            self._told = self._decode(self._window)
        elif len(self._window) > _LONGEST_WINDOW:
            self._window = self._window[-_SURE_TOKENS:]
            self._fresh = 0
            self._told = _sure(self._decode(self._window))
        else:
            self._told = sure
        return piece


def _sure(text: str) -> str:
    """The text without the replacement characters at its end that may still become a character."""
    end = len(text)
    while end > 0 and len(text) - end < _MOST_UNSURE and text[end - 1] == REPLACEMENT:
        end -= 1
    return text[:end]
