"""From a model's tokens to text deltas and an outcome."""

from collections.abc import Callable, Collection, Sequence

from transformers import PreTrainedTokenizerBase

from fairlane.outcomes import Code, FinishReason
from fairlane.records import Output, TokenLogprob, TokenUsage, TopLogprob
from inference_consumers.engines.generated_text import GeneratedText, fault_of
from inference_consumers.engines.protocol import Failure, ItemOutcome, Success
from inference_consumers.engines.sampling import Logprobs


class TokenNames:
    """The text of single tokens, as it would stand inside a text."""

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

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


class Answer:
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
            return "", Failure(Code.ENGINE_ERROR, "the model computed a value that is not a finite number")
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
        fault = fault_of(text, self.tokens, reason, may_be_empty=may_be_empty, may_be_broken=self._may_be_broken)
        if fault is not None:
            return Failure(Code.ENGINE_ERROR, fault)
        return Success(Output(text=text, logprobs=self._token_logprobs(len(text))), usage, reason)

    def _token_logprobs(self, text_length: int) -> tuple[TokenLogprob, ...] | None:
        """Of the tokens that wrote some of the text, or None where they were not asked for."""
        if not self._logprobs:
            return None
        name = self._names.of
        return tuple(
            TokenLogprob(name(token), found.chosen, tuple(TopLogprob(name(other), value) for other, value in found.top))
            for place, token, found in self._logprobs
            if place < text_length
        )
