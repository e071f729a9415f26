"""Pictures from strangers, as the grey pixels that a model takes. Imports no torch.

A PNG, JPEG or WebP file becomes grey by luminance (ITU-R BT.601: 0.299 red, 0.587 green, 0.114 blue), 16-bit values
are scaled to 8 bits, transparency is laid over black, and the orientation that a camera noted is applied. It is then
stretched to the model's size, whatever its own proportions: each pixel is the mean of the area it covers (Pillow's box
filter), which leaves a picture of the right size as it is.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO

import numpy as np
from PIL import Image, ImageChops, ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

MAX_PIXELS = 16_777_216
"""Most pixels of a picture before it is resized, 4,096 x 4,096: at four bytes each, the memory of a decoder."""

MAX_JPEG_SCANS = 100
"""A progressive JPEG may describe every pixel again in each of thousands of scans of a few bytes."""

_ORIENTATION_TAG = 0x0112
# What undoes each value of the tag; 1 is upright (Exif 2.32, section 4.6.4).
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class ImageError(Exception):
    """The bytes are no picture that can be used; the message says why, and quotes none of them."""


@dataclass(frozen=True, slots=True)
class _Format:
    """``check`` looks at a file before it is opened. The class is called directly: Pillow's own choice would try other
    formats, and warn where a picture is far too large instead of refusing it."""

    name: str
    open: Callable[[BytesIO], ImageFile.ImageFile]
    check: Callable[[bytes], None]


def grey_pixels(image: bytes, height: int, width: int) -> bytes:
    """``height * width`` bytes, row by row, 0 for black and 255 for white.

    ``image`` is a PNG, JPEG or WebP file, or just these bytes. Raises ImageError.
    """
    kind = _format_of(image)
    if len(image) == height * width and (kind is None or _may_be_pixels(image)):
        return image
    if kind is None:
        raise ImageError(
            f"must be a PNG, JPEG or WebP file, or {height} x {width} grey pixels, {height * width} bytes; "
            f"got {len(image)} bytes of something else"
        )
    return _decode(image, kind).resize((width, height), Image.Resampling.BOX).tobytes()


def _format_of(image: bytes) -> _Format | None:
    if image.startswith(b"\x89PNG\r\n\x1a\n"):
        return _PNG
    if image.startswith(b"\xff\xd8\xff"):
        return _JPEG
    if image.startswith(b"RIFF") and image[8:12] == b"WEBP":
        return _WEBP
    return None


def _may_be_pixels(image: bytes) -> bool:
    """A JPEG begins with only three bytes that pixels might begin with too: its end must look like one as well."""
    return image.startswith(b"\xff\xd8") and not image.endswith(b"\xff\xd9")


def _decode(image: bytes, kind: _Format) -> Image.Image:
    """Upright and of mode L."""
    kind.check(image)
    try:
        with kind.open(BytesIO(image)) as opened:
            _check_size(kind.name, opened.width, opened.height)
            _check_still(kind.name, opened)
            opened.load()
            grey = _grey(opened)
            orientation = _orientation(opened)
    except (ImageError, MemoryError):
        raise
    except Exception as error:
        # A decoder fails on damaged bytes in any way it likes; its words may quote them.
        raise ImageError(f"the {kind.name} cannot be decoded: it is damaged or incomplete") from error
    return grey.transpose(_UPRIGHT[orientation]) if orientation in _UPRIGHT else grey


def _check_size(name: str, width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise ImageError(f"the {name} has {width} x {height} pixels; at most {MAX_PIXELS} are taken")


def _check_still(name: str, image: Image.Image) -> None:
    if getattr(image, "is_animated", False):
        raise ImageError(f"the {name} is animated; one still picture is needed")


def _grey(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):
        # Pillow would cut values off at 255.
        return Image.fromarray(((np.asarray(image).astype(np.uint32) + 128) // 257).astype(np.uint8))
    if "transparency" in image.info:
        image = image.convert("RGBA")
    if image.mode in {"LA", "RGBA", "PA"}:
        return ImageChops.multiply(image.convert("L"), image.getchannel("A"))
    if image.mode == "CMYK":
        image = image.convert("RGB")
    return image.convert("L")


def _orientation(image: Image.Image) -> int:
    """1, upright, where none can be read: many a good picture carries damaged metadata."""
    with contextlib.suppress(Exception):
        return int(image.getexif().get(_ORIENTATION_TAG, 1))
    return 1


def _check_nothing(_image: bytes) -> None:
    """Pillow reads no more than the header when it opens these."""


def _check_scans(image: bytes) -> None:
    scans = image.count(b"\xff\xda")
    if scans > MAX_JPEG_SCANS:
        raise ImageError(f"the JPEG has {scans} scans; at most {MAX_JPEG_SCANS} are taken")


def _check_canvas(image: bytes) -> None:
    """Pillow allocates the canvas when it opens a WebP (RFC 9649, sections 2.5 to 2.7, for where its size stands)."""
    body = image[20:30]
    match image[12:16]:
        case b"VP8X":
            width, height = (1 + int.from_bytes(body[start : start + 3], "little") for start in (4, 7))
        case b"VP8L":
            bits = int.from_bytes(body[1:5], "little")
            width, height = 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
        case _:
            width, height = (int.from_bytes(body[start : start + 2], "little") & 0x3FFF for start in (6, 8))
    _check_size("WebP", width, height)


_PNG = _Format("PNG", PngImageFile, _check_nothing)
_JPEG = _Format("JPEG", JpegImageFile, _check_scans)
_WEBP = _Format("WebP", WebPImageFile, _check_canvas)
