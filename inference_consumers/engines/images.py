"""Untrusted images to pixels. Imports no torch.

A PNG, JPEG or WebP file becomes red, green and blue, or grey by luminance (ITU-R BT.601: 0.299 red, 0.587 green, 0.114
blue), 16-bit values are scaled to 8 bits, transparency is laid over black, and the orientation that a camera noted is
applied. It is then stretched to the model's size, whatever its own proportions: each pixel is the mean of the area it
covers (Pillow's box filter), which leaves a picture of the right size as it is.
"""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BytesIO

import numpy as np
from PIL import Image, ImageChops, ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from fairlane_server.image_header import MAX_PIXELS, ImageHeader, image_format, image_header

MAX_JPEG_SCANS = 100
"""A progressive JPEG may describe every pixel again in each of thousands of scans of a few bytes."""

MAX_SCANNED_PIXELS = 20 * MAX_PIXELS
"""Pixels times scans: encoders make six to twelve scans, and 18 for CMYK. One of the largest picture takes some 15 ms
even if it is empty."""

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
class PixelFormat:
    """Input format of a model: rows, columns, and one byte for grey or three for red, green and blue."""

    height: int
    width: int
    channels: int = 1

    @property
    def size_bytes(self) -> int:
        return self.height * self.width * self.channels

    @property
    def mode(self) -> str:
        return "L" if self.channels == 1 else "RGB"

    def __str__(self) -> str:
        return f"{self.height} x {self.width} {'grey' if self.channels == 1 else 'RGB'} pixels, {self.size_bytes} bytes"


# Called directly: Pillow's own choice would try other formats, and warn where a picture is far too large instead of
# refusing it.
_OPENERS: Mapping[str, Callable[[BytesIO], ImageFile.ImageFile]] = {
    "PNG": PngImageFile,
    "JPEG": JpegImageFile,
    "WebP": WebPImageFile,
}


def pixels_of(image: bytes, wanted: PixelFormat) -> bytes:
    """The pixels row by row, 0 for black and 255 for white, with the colours of a pixel next to one another.

    ``image`` is a PNG, JPEG or WebP file, or just these bytes. Raises ImageError.
    """
    name = image_format(image)
    # A JPEG begins with only three bytes that pixels might begin with too: its end must look like one as well.
    may_be_pixels = name is None or (image.startswith(b"\xff\xd8") and not image.endswith(b"\xff\xd9"))
    if len(image) == wanted.size_bytes and may_be_pixels:
        return image
    if name is None:
        raise ImageError(f"must be a PNG, JPEG or WebP file, or {wanted}; got {len(image)} bytes of something else")
    decoded = _decoded(image, name, wanted.mode)
    return decoded.resize((wanted.width, wanted.height), Image.Resampling.BOX).tobytes()


def _decoded(image: bytes, name: str, mode: str) -> Image.Image:
    """Upright and of that mode. What it may cost is known, and bounded, before a decoder sees it."""
    header = image_header(image)
    if header is None:
        raise _damaged(name)
    _check_size(header)
    _check_scans(header, header.scans(image))
    try:
        with _OPENERS[name](BytesIO(image)) as opened:
            # The decoder's word on the size counts, wherever it found it.
            _check_size(ImageHeader(name, opened.width, opened.height))
            _check_still(name, opened)
            opened.load()
            converted = _converted(opened, mode)
            orientation = _orientation(opened)
    except (ImageError, MemoryError):
        raise
    except Exception as error:
        # A decoder fails on damaged bytes in any way it likes; its words may quote them.
        raise _damaged(name) from error
    return converted.transpose(_UPRIGHT[orientation]) if orientation in _UPRIGHT else converted


def _damaged(name: str) -> ImageError:
    return ImageError(f"the {name} cannot be decoded: it is damaged or incomplete")


def _check_still(name: str, image: Image.Image) -> None:
    if getattr(image, "is_animated", False):
        raise ImageError(f"the {name} is animated; one still picture is needed")


def _check_size(header: ImageHeader) -> None:
    if header.refusal is not None:
        raise ImageError(header.refusal)


def _check_scans(header: ImageHeader, scans: int) -> None:
    if scans > MAX_JPEG_SCANS:
        raise ImageError(f"the {header.format} has {scans} scans; at most {MAX_JPEG_SCANS} are taken")
    if header.pixels * scans > MAX_SCANNED_PIXELS:
        raise ImageError(
            f"the {header.format} has {header.width} x {header.height} pixels in {scans} scans; "
            f"at most {MAX_SCANNED_PIXELS} pixels times scans are taken"
        )


def _converted(image: Image.Image, mode: str) -> Image.Image:
    if image.mode.startswith("I;16"):
        # Pillow would cut values off at 255.
        grey = Image.fromarray(((np.asarray(image).astype(np.uint32) + 128) // 257).astype(np.uint8))
        return grey.convert(mode)
    if "transparency" in image.info:
        image = image.convert("RGBA")
    if image.mode in {"LA", "RGBA", "PA"}:
        alpha, opaque = image.getchannel("A"), image.convert(mode)
        if mode == "L":
            return ImageChops.multiply(opaque, alpha)
        return Image.composite(opaque, Image.new(mode, image.size), alpha)
    if image.mode == "CMYK":
        image = image.convert("RGB")
    return image.convert(mode)


def _orientation(image: Image.Image) -> int:
    """1, upright, where none can be read: many a good picture carries damaged metadata."""
    with contextlib.suppress(Exception):
        return int(image.getexif().get(_ORIENTATION_TAG, 1))
    return 1
