"""Size and cost of an image from the header of a PNG, JPEG or WebP file. Pure Python; decodes nothing and reads a
bounded number of bytes."""

from dataclasses import dataclass

MAX_PIXELS = 16_777_216
"""Most pixels of an image before it is resized, 4,096 x 4,096: at four bytes each, the memory of a decoder."""

PIXELS_PER_TOKEN = 1_024
"""A picture of 32 x 32 is one token beside the least. Decoding takes 6 to 35 microseconds for so many."""

LEAST_IMAGE_TOKENS = 128
"""The fixed cost of an image. A small image takes some milliseconds and the largest 0.5 s. Without it, the rate
measured on small images would predict minutes for a large one."""

_MAX_JPEG_STEPS = 1_000
"""Over segments and bytes that fill the space between them, to the segment that names the size. A camera's file has
some twenty, and an ICC profile at most 255 more."""

_START_OF_FRAME = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_WITHOUT_LENGTH = frozenset({0x01, *range(0xD0, 0xD9)})
_START_OF_SCAN, _END, _FILL = 0xDA, 0xD9, 0xFF


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """Header fields of a PNG, JPEG or WebP file; sides in pixels, as stored. ``frame_at`` is the offset of a JPEG's
    frame, behind the metadata."""

    format: str
    width: int
    height: int
    frame_at: int = 0

    @property
    def pixels(self) -> int:
        return self.width * self.height

    def scans(self, image: bytes) -> int:
        """Upper bound on passes over the pixels: a progressive JPEG describes them several times.

        Within the data of a scan a byte of 255 is never followed by the second byte of a marker, and metadata stands
        before the frame. A file that was made to contain more markers is counted as more scans, which hurts its sender.
        """
        return max(1, image.count(b"\xff\xda", self.frame_at)) if self.format == "JPEG" else 1

    @property
    def refusal(self) -> str | None:
        """Why an image of this size is not taken; None when it is."""
        if self.pixels == 0:
            return f"the {self.format} has {self.width} x {self.height} pixels, which is none"
        if self.pixels > MAX_PIXELS:
            return f"the {self.format} has {self.width} x {self.height} pixels; at most {MAX_PIXELS} are taken"
        return None


def image_header(image: bytes) -> ImageHeader | None:
    """The header of a file; None for what is no such file, or does not say its size where it must."""
    name = image_format(image)
    return None if name is None else _READERS[name](image)


def image_format(image: bytes) -> str | None:
    """PNG, JPEG or WebP by the first bytes; None for anything else."""
    if image.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if image.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    return "WebP" if image.startswith(b"RIFF") and image[8:12] == b"WEBP" else None


def image_tokens(image: bytes) -> int:
    """The cost of an image in tokens: LEAST_IMAGE_TOKENS, and one for each PIXELS_PER_TOKEN of its pixels, or of its
    bytes if these are more. Pixels count because a file of a few bytes can hold very many."""
    header = image_header(image)
    pixels = 0 if header is None or header.refusal else header.pixels
    return LEAST_IMAGE_TOKENS + max(pixels, len(image)) // PIXELS_PER_TOKEN


def _png(image: bytes) -> ImageHeader | None:
    if image[12:16] != b"IHDR" or len(image) < 24:
        return None
    return ImageHeader("PNG", int.from_bytes(image[16:20]), int.from_bytes(image[20:24]))


def _jpeg(image: bytes) -> ImageHeader | None:
    """ITU-T T.81, annex B. Segments follow one another, each with its length, up to the first scan."""
    at = 2
    for _ in range(_MAX_JPEG_STEPS):
        if image[at : at + 1] != b"\xff" or at + 4 > len(image):
            return None
        marker, length = image[at + 1], int.from_bytes(image[at + 2 : at + 4])
        if marker in _START_OF_FRAME:
            return _frame(image, at)
        if marker in {_START_OF_SCAN, _END}:
            return None
        if marker == _FILL:
            at += 1
        elif marker in _WITHOUT_LENGTH:
            at += 2
        else:
            at += 2 + length
    return None


def _frame(image: bytes, at: int) -> ImageHeader | None:
    length, parts = int.from_bytes(image[at + 2 : at + 4]), image[at + 9 : at + 10]
    if not parts or length != 8 + 3 * parts[0] or image[at + 4] not in {8, 12, 16}:
        return None
    height, width = (int.from_bytes(image[start : start + 2]) for start in (at + 5, at + 7))
    return ImageHeader("JPEG", width, height, at)


def _webp(image: bytes) -> ImageHeader | None:
    """RFC 9649, sections 2.5 to 2.7."""
    body = image[20:30]
    if len(body) < 10:
        return None
    match image[12:16]:
        case b"VP8X":
            width, height = (1 + int.from_bytes(body[start : start + 3], "little") for start in (4, 7))
        case b"VP8L":
            bits = int.from_bytes(body[1:5], "little")
            width, height = 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
        case b"VP8 ":
            width, height = (int.from_bytes(body[start : start + 2], "little") & 0x3FFF for start in (6, 8))
        case _:
            return None
    return ImageHeader("WebP", width, height)


_READERS = {"PNG": _png, "JPEG": _jpeg, "WebP": _webp}
