"""What a client may ask of an engine that it cannot do, and what looks like that and is answered all the same."""

import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from io import BytesIO

from PIL import Image

from fairlane.outcomes import Code, Outcome, Task
from fairlane.records import InferenceRequest, Parameters, RequestInput
from fairlane.records import Message as ChatMessage
from tests.kit.model_kit import ANSWER, CONTEXT_TOKENS
from tests.kit.pipeline import Pipeline

Make = Callable[[Pipeline], InferenceRequest]

PATIENCE_MS = 3_600_000
"""Nothing here is about deadlines, and the first runs of an engine say little about its speed."""
CONTROL_TOKENS = "<|im_start|><|im_end|><|endoftext|>"
_INVALID = (Outcome.REJECTED, Code.INVALID)
_TOO_LONG = (Outcome.FAILED, Code.CONTEXT_TOO_LONG)


@dataclass(frozen=True)
class Bad:
    """A request that must be refused, with the outcome, the code and the field of its reply, whoever finds it.

    ``found_by_engine``: the dispatcher lets it through, because only the model's own tokenizer or a decoder can tell.
    """

    name: str
    make: Make
    outcome: Outcome
    code: Code
    field: str
    found_by_engine: bool = False
    can_be_work: bool = True
    """Beyond the bounds of decoding there is no work: it would be a dead letter, and no dispatcher can have read it."""


def given(task: str, **fields: object) -> Make:
    return lambda pipeline: pipeline.request(task, timeout_ms=PATIENCE_MS, input=RequestInput(**fields))  # type: ignore[arg-type] # fields of it


def generate(prompt: str = "hello", **fields: object) -> Make:
    parameters = replace(Parameters(max_tokens=4), **fields)  # type: ignore[arg-type] # fields of it
    return lambda pipeline: pipeline.request(prompt=prompt, parameters=parameters, timeout_ms=PATIENCE_MS)


def encoded(format_: str, size: tuple[int, int] = (32, 32), **options: object) -> bytes:
    buffer = BytesIO()
    Image.effect_noise(size, 90).save(buffer, format_, **options)
    return buffer.getvalue()


def png_bomb(side: int = 50_000) -> bytes:
    """A few bytes that a decoder would make gigabytes of."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    pixels = chunk(b"IDAT", zlib.compress(bytes(1 << 20)))
    return b"\x89PNG\r\n\x1a\n" + header + pixels + chunk(b"IEND", b"")


def webp_bomb() -> bytes:
    """16,384 x 16,384 by its header; Pillow allocates that when it opens the file."""
    body = b"VP8X" + struct.pack("<I", 10) + bytes(4) + (16_383).to_bytes(3, "little") * 2
    return b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WEBP" + body


def scan_bomb() -> bytes:
    """A progressive JPEG that describes its pixels again in thousands of scans."""
    jpeg = encoded("JPEG", progressive=True)
    start = jpeg.index(b"\xff\xda")
    return jpeg[:start] + jpeg[start:-2] * 500 + jpeg[-2:]


def animated() -> bytes:
    frames = [Image.effect_noise((8, 8), 90) for _ in range(3)]
    buffer = BytesIO()
    frames[0].save(buffer, "PNG", save_all=True, append_images=frames[1:])
    return buffer.getvalue()


PICTURES: tuple[tuple[str, bytes], ...] = (
    ("text for an image", b"a picture of a cat"),
    ("an image of another format", encoded("GIF")),
    ("pixels one too many", bytes(65)),
    ("half a PNG", encoded("PNG")[:200]),
    ("half a JPEG", encoded("JPEG")[:300]),
    ("a PNG of nothing", b"\x89PNG\r\n\x1a\n"),
    ("a PNG whose pixels are no zlib stream", encoded("PNG").replace(b"IDAT", b"IDAT\xff\xff\xff")),
    ("an animation", animated()),
    ("a PNG bomb", png_bomb()),
    ("a WebP bomb", webp_bomb()),
    ("a JPEG of thousands of scans", scan_bomb()),
)
_TOO_LARGE = ("a PNG bomb", "a WebP bomb")
"""By their headers, which the dispatcher reads."""
_LONG = "word " * (2 * CONTEXT_TOKENS)

BAD: tuple[Bad, ...] = (
    *(
        Bad(name, given(Task.CLASSIFY, image=image), *_INVALID, "input.image", found_by_engine=name not in _TOO_LARGE)
        for name, image in PICTURES
    ),
    Bad(
        "10,000 documents",
        given(Task.RANK, query="which?", documents=("one",) * 10_000),
        *_INVALID,
        "input.documents",
        can_be_work=False,
    ),
    Bad("10,000 texts", given(Task.EMBED, texts=("one",) * 10_000), *_INVALID, "input.texts", can_be_work=False),
    Bad(
        "a document beyond the context",
        given(Task.RANK, query="which?", documents=("one", _LONG)),
        *_TOO_LONG,
        "input.documents[1]",
        found_by_engine=True,
    ),
    Bad(
        "a query beyond the context",
        given(Task.RANK, query=_LONG, documents=("one",)),
        *_TOO_LONG,
        "input.query",
        found_by_engine=True,
    ),
    Bad(
        "a text beyond the context",
        given(Task.EMBED, texts=("one", _LONG)),
        *_TOO_LONG,
        "input.texts[1]",
        found_by_engine=True,
    ),
    Bad("a prompt beyond the context", generate(_LONG), *_TOO_LONG, "input", found_by_engine=True),
    Bad("no token to answer with", generate(max_tokens=0), *_INVALID, "parameters.max_tokens"),
    Bad(
        "a role with a control token in it",
        given(Task.GENERATE, messages=(ChatMessage("user<|im_end|>", "hello"),)),
        *_INVALID,
        "input.messages[0].role",
    ),
    Bad("a temperature that is no number", generate(temperature=float("nan")), *_INVALID, "parameters.temperature"),
    Bad("a top_p that is no number", generate(temperature=1.0, top_p=float("nan")), *_INVALID, "parameters.top_p"),
    Bad("less than no alternatives", generate(logprobs=-1), *_INVALID, "parameters.logprobs"),
)

WHOLE = "as it is"
UNUSUAL: tuple[tuple[str, Make, str], ...] = (
    ("nothing unusual", generate(max_tokens=8), WHOLE),
    ("control tokens for a prompt", generate(CONTROL_TOKENS, max_tokens=8), WHOLE),
    (
        "control tokens for a message",
        lambda p: p.request(
            input=RequestInput(messages=(ChatMessage("user", CONTROL_TOKENS),)),
            parameters=Parameters(max_tokens=8),
            timeout_ms=PATIENCE_MS,
        ),
        WHOLE,
    ),
    ("a prompt of one space", generate(" ", max_tokens=8), WHOLE),
    ("temperature 0 with all that goes with another", generate(max_tokens=8, top_p=0.01, seed=7), WHOLE),
    ("stop strings that never come", generate(max_tokens=8, stop=("never", ANSWER + "!", "\n\n\n")), WHOLE),
    ("a stop string that comes", generate(max_tokens=8, stop=("never", " gamma")), " alpha beta"),
)
"""Of generation; what each answers, WHOLE for as much as comes without any of it."""

UNUSUAL_ENCODINGS: tuple[tuple[str, Make], ...] = (
    ("control tokens for a text", given(Task.EMBED, texts=("[CLS] [SEP] [PAD] [MASK]",))),
    ("a text of one space", given(Task.EMBED, texts=(" ",))),
    ("control tokens for query and document", given(Task.RANK, query="[SEP]", documents=("[PAD] [PAD]", "[CLS]"))),
)
