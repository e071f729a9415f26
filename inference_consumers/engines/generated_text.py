"""Text of one answer: tokens to text deltas, stop strings, and the outcome."""

from collections.abc import Callable, Collection, Iterable, Sequence

from transformers import PreTrainedTokenizerBase

from fairlane.outcomes import Code, FinishReason
from fairlane.records import Output, TokenLogprob, TokenUsage, TopLogprob
from inference_consumers.engines.protocol import NOT_FINITE, Failure, ItemOutcome, Success
from inference_consumers.engines.sampling import Logprobs

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
    comes first differently, and text that ends in a replacement character waits for the rest of it. Beyond theirs, all
    of a run of replacement characters but its end is released: a model that writes nothing else holds up nothing.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._fresh = 0  # where in the window the tokens begin that came since the last piece
        self._released = ""  # the part of the window's text that was released

    def add(self, token_id: int) -> str:
        """The text that is certain now and was not before. What is never certain ends in half a character."""
        self._window.append(token_id)
        text = self._decode(self._window)
        sure = _sure(text)
        piece = sure[len(self._released) :]
        if piece and sure == text:
            self._window = self._window[self._fresh :]
            self._fresh = len(self._window)
            self._released = self._decode(self._window)
        elif len(self._window) > _LONGEST_WINDOW:
            self._window = self._window[-_SURE_TOKENS:]
            self._fresh = 0
            self._released = _sure(self._decode(self._window))
        else:
            self._released = sure
        return piece


def _sure(text: str) -> str:
    """The text without the replacement characters at its end that may still become a character."""
    end = len(text)
    while end > 0 and len(text) - end < _MOST_UNSURE and text[end - 1] == REPLACEMENT:
        end -= 1
    return text[:end]


class StopStrings:
    """Watches a text for its first stop string. Keeps only as much of the text as one of them may begin in, so that
    the cost of a character does not grow with the text. Empty strings stop nothing."""

    def __init__(self, stops: Sequence[str]) -> None:
        # Of several that end with the same character, the longest is found first.
        self._stops = sorted(filter(None, stops), key=len, reverse=True)
        self._tail = ""
        self._seen = 0

    @property
    def held(self) -> int:
        """Number of trailing characters that may begin a stop string."""
        tail = self._tail
        lengths = (n for n in range(len(tail), 0, -1) if any(stop.startswith(tail[-n:]) for stop in self._stops))
        return next(lengths, 0)

    def feed(self, text: str) -> int | None:
        """Read on. The place in the whole text where the first stop string begins, once that is complete.

        Of several that are complete with the same character the longest counts. Nothing may be fed after that.
        """
        if not self._stops:
            return None
        window = self._tail + text
        self._seen += len(text)
        found = [(at + len(stop), at) for stop in self._stops if (at := window.find(stop)) >= 0]
        if found:
            return self._seen - len(window) + min(found)[1]
        self._tail = window[max(0, len(window) - len(self._stops[0]) + 1) :]
        return None


class GeneratedText:
    """Releases text when it is final: whole characters that cannot become part of a stop string. The pieces together
    are the text of the answer."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(decode)
        self._stops = StopStrings(stops)
        self._pieces: list[str] = []
        self._released_length = 0
        self._pending = ""
        self.is_stopped = False

    @property
    def length(self) -> int:
        """Characters so far, those that may become part of a stop string among them."""
        return self._released_length + len(self._pending)

    def add(self, token_id: int) -> str:
        """The text that is certain with this token; ``is_stopped`` says whether a stop string is complete."""
        piece = self._detokenizer.add(token_id)
        self._pending += piece
        cut = self._stops.feed(piece)
        if cut is None:
            return self._release(len(self._pending) - self._stops.held)
        self.is_stopped = True
        self._pending = self._pending[: cut - self._released_length]
        return self._release(len(self._pending))

    def end(self) -> str:
        """No more tokens: the text that was held for a stop string which never came. Half a character is dropped."""
        return self._release(len(self._pending))

    def whole(self) -> str:
        return "".join(self._pieces)

    def _release(self, characters: int) -> str:
        certain, self._pending = self._pending[:characters], self._pending[characters:]
        if certain:
            self._pieces.append(certain)
            self._released_length += characters
        return certain


def outcome_of_text(
    text: str,
    usage: TokenUsage,
    reason: FinishReason,
    logprobs: tuple[TokenLogprob, ...] | None,
    may_be_empty: bool,
    may_be_broken: Callable[[], bool],
) -> ItemOutcome:
    """A text is no answer if it is empty, or if its tokens wrote bytes that are no UTF-8.

    ``may_be_broken`` is for a prompt with a replacement character, which the answer may repeat. It is called only where
    there is one.
    """
    if (REPLACEMENT not in text or may_be_broken()) and (text or may_be_empty):
        return Success(Output(text=text, logprobs=logprobs), usage, reason)
    tokens = usage.completion_tokens
    if not text and tokens == 1 and reason == FinishReason.STOP:
        return Failure(Code.ENGINE_ERROR, "the model ended its answer before the first token")
    return Failure(Code.ENGINE_ERROR, f"the model wrote {tokens} tokens that are no text")


class TokenNames:
    """Text of single tokens, as inside a longer text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        # Some decoders drop the space before a first token.
        self._context: list[int] = tokenizer("a", add_special_tokens=False)["input_ids"]
        self._context_length = len(self._decode(self._context))
        self._names: dict[int, str] = {}

    def of(self, token_id: int) -> str:
        """Control tokens by their names; part of a character is a replacement character."""
        name = self._names.get(token_id)
        if name is None:
            name = self._names[token_id] = self._decode([*self._context, token_id])[self._context_length :]
        return name

    def logprobs(self, tokens: Iterable[tuple[int, Logprobs]]) -> tuple[TokenLogprob, ...]:
        return tuple(
            TokenLogprob(
                self.of(token), found.chosen, tuple(TopLogprob(self.of(other), value) for other, value in found.top)
            )
            for token, found in tokens
        )

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


class GeneratedAnswer:
    """One answer while it is generated. The end token and the tokens of a stop string count: each was a step."""

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        names: TokenNames,
        end_ids: Collection[int],
        *,
        max_tokens: int,
        stop: Sequence[str] = (),
        may_be_broken: Callable[[], bool],
    ) -> None:
        """``decode`` is a Detokenizer's; ``end_ids`` are the tokens that end an answer; ``may_be_broken`` says
        whether replacement characters are allowed in it."""
        self._may_be_broken = may_be_broken
        self.max_tokens = max_tokens
        self.tokens = 0
        self.last_token = 0
        self._text = GeneratedText(decode, stop)
        self._names = names
        self._end_ids = end_ids
        self._logprobs: list[tuple[int, int, Logprobs]] = []  # where in the text, the token, its probabilities

    def add(self, token: int | None, logprobs: Logprobs | None, prompt_tokens: int) -> tuple[str, ItemOutcome | None]:
        """The text that is certain now, and the outcome if this was the last token.

        None for a token: no usable number was computed. ``prompt_tokens`` is for the usage alone.
        """
        if token is None:
            return "", NOT_FINITE
        self.tokens += 1
        self.last_token = token
        usage = TokenUsage(prompt_tokens=prompt_tokens, completion_tokens=self.tokens)
        if token in self._end_ids:
            return self._end(usage, FinishReason.STOP)
        if logprobs is not None:
            self._logprobs.append((self._text.length, token, logprobs))
        text = self._text.add(token)
        if self._text.is_stopped:
            return text, self._outcome(usage, FinishReason.STOP, may_be_empty=True)
        if self.tokens < self.max_tokens:
            return text, None
        rest, outcome = self._end(usage, FinishReason.LENGTH)
        return text + rest, outcome

    def _end(self, usage: TokenUsage, reason: FinishReason) -> tuple[str, ItemOutcome]:
        rest = self._text.end()
        return rest, self._outcome(usage, reason, may_be_empty=False)

    def _outcome(self, usage: TokenUsage, reason: FinishReason, *, may_be_empty: bool) -> ItemOutcome:
        text = self._text.whole()
        written = [(token, found) for place, token, found in self._logprobs if place < len(text)]
        logprobs = self._names.logprobs(written) if self._logprobs else None
        return outcome_of_text(text, usage, reason, logprobs, may_be_empty, self._may_be_broken)
