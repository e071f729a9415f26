"""Reusable answers: their cache keys and their stored form. Pure.

The dispatcher looks answers up and the consumers store them; both compute the key here. The key covers everything that
an answer depends on, and nothing that only says where and when it goes (id, priority, timeout, reply topic, group,
streaming). Metadata is in it for a tenant whose input is checked: the checks see it, and a cached answer is given
without them.
"""

import re
from dataclasses import dataclass
from hashlib import blake2b
from math import isfinite

import msgspec

from fairlane.guardrail_records import GuardrailPolicy, GuardrailVerdict
from fairlane.outcomes import GuardrailResult, Outcome, RetrievalMode, Task
from fairlane.records import (
    InferenceReply,
    InferenceRequest,
    Output,
    Parameters,
    PassageReference,
    TokenUsage,
    WorkItem,
)
from fairlane_server.caching.entries import UNREADABLE, CacheKey, CacheName, Canonical, cache_key, canonical
from fairlane_server.guardrail_policy import policy_digest

MOST_QUESTION_CHARACTERS = 300
"""Longest question that may get the answer to another one with the same meaning."""

WORDING_BYTES = 8

_MOST_NUMBER = 2**53
_USER = "user"
_WORD = re.compile(r"[^\W_]+(?:['\u2019.,:/-][^\W_]+)*")
_SENTENCE_BEGINS = re.compile(r"[.!?:\n][\s\"'(\u201c\u2018]*\Z|\A[\s\"'(\u201c\u2018]*\Z")
_SIGHT = 8
_NEGATIONS = frozenset(
    {"no", "not", "nor", "none", "never", "nothing", "nobody", "neither", "without", "except", "cannot"}
)


@dataclass(frozen=True, slots=True)
class CachedAnswer:
    """An answer as its first requester got it, after all checks. ``request_id`` is that of the first request, of the
    same tenant; ``usage`` is its cost."""

    request_id: str
    model: str
    model_version: str
    task: str
    engine: str | None
    output: Output
    finish_reason: str | None
    usage: TokenUsage
    passages: tuple[PassageReference, ...]
    finished_at_ms: int
    guardrails: tuple[GuardrailVerdict, ...] = ()


def response_key(
    tenant: str,
    request: InferenceRequest,
    model_version: str,
    collection_version: int | None,
    policy: GuardrailPolicy | None = None,
) -> CacheKey | None:
    """Key of the exact answer to this request, with the parameters that it runs with and under this policy of
    guardrails; None when a repetition could get another answer. ``collection_version`` is None without retrieval."""
    if not _is_repeatable(request, collection_version):
        return None
    given = request.input
    messages = None if given.messages is None else [(one.role, one.content) for one in given.messages]
    return cache_key(
        CacheName.RESPONSE,
        tenant,
        request.model,
        model_version,
        request.task,
        (messages, given.prompt, given.texts, given.query, given.documents, given.image),
        _parameters(request.parameters),
        _retrieval(request, collection_version),
        *_guardrails(policy),
        *_checked_metadata(request, policy),
    )


def semantic_group(
    tenant: str,
    request: InferenceRequest,
    model_version: str,
    collection_version: int | None,
    embedder: str,
    policy: GuardrailPolicy | None = None,
) -> CacheKey | None:
    """Key of all requests that differ only in their last user message and have the same ``distinctive_words``.

    Requests of a group may share an answer if the embedder finds that their messages mean the same. None for a request
    that belongs to no group, and for one whose input is checked: the answer to another question says nothing about this
    one's input.
    """
    query = semantic_query(request)
    if query is None or (policy is not None and policy.input) or not _is_repeatable(request, collection_version):
        return None
    before = request.input.messages[:-1] if request.input.messages else ()
    return cache_key(
        CacheName.SEMANTIC,
        tenant,
        request.model,
        model_version,
        embedder,
        "prompt" if request.input.messages is None else "messages",
        [(message.role, message.content) for message in before],
        distinctive_words(query),
        _parameters(request.parameters),
        _retrieval(request, collection_version),
        *_guardrails(policy),
    )


def semantic_query(request: InferenceRequest) -> str | None:
    """The text to compare by meaning: the prompt, or the last message if it is the user's. None for other requests, and
    for a text so long that its question would drown in it."""
    given = request.input
    if request.task != Task.GENERATE or (given.messages is None) == (given.prompt is None):
        return None
    text = given.prompt or ""
    if given.messages:
        last = given.messages[-1]
        text = last.content if last.role == _USER else ""
    return text if 0 < len(text) <= MOST_QUESTION_CHARACTERS else None


def distinctive_words(text: str) -> tuple[str, ...]:
    """The words that answers depend on and small embedders hardly see: numbers, names and negations, in lower case and
    in order. A name has a capital letter other than at the beginning of a sentence."""
    found = []
    for match in _WORD.finditer(text):
        word = match[0]
        begins = _SENTENCE_BEGINS.search(text, max(0, match.start() - _SIGHT), match.start()) is not None
        capitals = word[1:] if begins or match.start() == 0 else word
        is_name = capitals != capitals.lower() and word.split("'")[0].split("\u2019")[0] != "I"
        plain = word.lower().replace("\u2019", "'")
        if is_name or any(map(str.isnumeric, word)) or plain in _NEGATIONS or plain.endswith("n't"):
            found.append(plain)
    return tuple(found)


def word_digests(text: str) -> tuple[bytes, bytes]:
    """Digests of a text's words, sorted and in order: an embedder that adds word vectors cannot tell reordered words
    apart."""
    words = [match[0].casefold() for match in _WORD.finditer(text)]
    return _digest(sorted(words)), _digest(words)


def _digest(words: list[str]) -> bytes:
    return blake2b(canonical(words), digest_size=WORDING_BYTES).digest()


def answer_of(work: WorkItem, reply: InferenceReply) -> tuple[CacheKey, CachedAnswer] | None:
    """Key and answer to store for finished work; None when an undisturbed run might answer differently. The caller
    checks whether the request wants its answer stored."""
    request, use = work.request, work.retrieval_use
    if reply.outcome != Outcome.OK or reply.replayed or reply.output is None or reply.model_version is None:
        return None
    if (reply.tenant, reply.request_id) != (work.tenant, request.request_id):
        return None
    if (reply.model, reply.model_version) != (request.model, work.model_version):
        return None
    if work.degradations or reply.degradations:
        return None
    if request.retrieval is not None:
        wanted = request.retrieval
        if use is None or use.reason is not None or (use.collection, use.mode) != (wanted.collection, wanted.mode):
            return None
    if any(one.verdict == GuardrailResult.FAILED_OPEN for one in reply.guardrails):
        return None
    version = None if use is None else use.collection_version
    key = response_key(work.tenant, request, work.model_version, version, work.guardrails)
    if key is None or not _is_finite(reply.output, reply.passages):
        return None
    return key, CachedAnswer(
        request_id=reply.request_id,
        model=request.model,
        model_version=work.model_version,
        task=request.task,
        engine=reply.engine,
        output=reply.output,
        finish_reason=reply.finish_reason,
        usage=reply.usage,
        passages=reply.passages,
        finished_at_ms=reply.timings.engine_finished_at_ms or 0,
        guardrails=reply.guardrails,
    )


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(CachedAnswer)


def encode_answer(answer: CachedAnswer) -> bytes:
    return _encoder.encode(answer)


def decode_answer(payload: bytes) -> CachedAnswer | None:
    """Decode a payload of ``encode_answer``; None for anything else, and for numbers that are out of range or not
    finite."""
    try:
        answer = _decoder.decode(payload)
    except UNREADABLE:
        return None
    usage = answer.usage
    numbers = usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, answer.finished_at_ms
    if not all(0 <= number <= _MOST_NUMBER for number in numbers):
        return None
    return answer if _is_finite(answer.output, answer.passages) else None


def is_cacheable(request: InferenceRequest) -> bool:
    """Whether the request can have a cache key, for any version of its collection."""
    return _is_repeatable(request, 0)


def _is_repeatable(request: InferenceRequest, collection_version: int | None) -> bool:
    """Whether equal requests get equal answers: no sampling, and no input that changes."""
    if request.parameters.temperature != 0 or request.conversation_id is not None:
        return False
    if request.retrieval is None:
        return True
    # In mode cached, the passages depend on earlier requests.
    return collection_version is not None and request.retrieval.mode != RetrievalMode.CACHED


def _guardrails(policy: GuardrailPolicy | None) -> tuple[Canonical, ...]:
    return () if policy is None else (policy_digest(policy),)


def _checked_metadata(request: InferenceRequest, policy: GuardrailPolicy | None) -> tuple[Canonical, ...]:
    return () if policy is None or not policy.input else (sorted(request.metadata.items()),)


def _parameters(given: Parameters) -> Canonical:
    sampling = float(given.temperature), float(given.top_p), given.seed
    return given.max_tokens, sampling, given.stop, given.logprobs


def _retrieval(request: InferenceRequest, collection_version: int | None) -> Canonical:
    wanted = request.retrieval
    return None if wanted is None else (wanted.collection, collection_version, wanted.mode, wanted.top_k)


def _is_finite(output: Output, passages: tuple[PassageReference, ...]) -> bool:
    numbers = [passage.score for passage in passages]
    numbers += output.scores or ()
    numbers += (label.score for label in output.labels or ())
    for vector in output.embeddings or ():
        numbers += vector
    for token in output.logprobs or ():
        numbers.append(token.logprob)
        numbers += (other.logprob for other in token.top)
    return all(map(isfinite, numbers))
