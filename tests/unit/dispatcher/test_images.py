"""Pictures from strangers: what becomes of each kind, and that none costs more than its size allows."""

import random
import re
import struct
import zlib
from io import BytesIO
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageFile, ImageFilter
from PIL.WebPImagePlugin import WebPImageFile

from fairlane_server.image_header import LEAST_IMAGE_TOKENS, MAX_PIXELS, image_header, image_tokens
from inference_consumers.engines.images import MAX_JPEG_SCANS, MAX_SCANNED_PIXELS, ImageError, PixelFormat, pixels_of

HEIGHT, WIDTH = 16, 24
GREY, RGB = PixelFormat(HEIGHT, WIDTH), PixelFormat(HEIGHT, WIDTH, 3)
FORMATS = ("PNG", "JPEG", "WEBP")
SIZE = f"{HEIGHT} x {WIDTH} grey pixels"


def smooth_picture(height: int = HEIGHT, width: int = WIDTH) -> Image.Image:
    """In colour, with no two corners alike, and smooth enough to survive a JPEG."""
    noise = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise).filter(ImageFilter.GaussianBlur(3))


def saved(image: Image.Image, format_: str, **options: Any) -> bytes:
    exact: dict[str, Any] = {"JPEG": {"quality": 100, "subsampling": 0}, "WEBP": {"lossless": True, "exact": True}}
    buffer = BytesIO()
    image.save(buffer, format_, **{**exact.get(format_, {}), **options})
    return buffer.getvalue()


def decoded(image: bytes, height: int = HEIGHT, width: int = WIDTH) -> npt.NDArray[np.int64]:
    return np.frombuffer(pixels_of(image, PixelFormat(height, width)), np.uint8).reshape(height, width).astype(np.int64)


def coloured(image: bytes) -> npt.NDArray[np.int64]:
    return np.frombuffer(pixels_of(image, RGB), np.uint8).reshape(HEIGHT, WIDTH, 3).astype(np.int64)


def grey_of(image: Image.Image) -> npt.NDArray[np.int64]:
    red, green, blue = np.asarray(image).astype(np.float64).transpose(2, 0, 1)
    grey: npt.NDArray[np.int64] = np.rint(0.299 * red + 0.587 * green + 0.114 * blue).astype(np.int64)
    return grey


def chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def png(width: int, height: int, depth: int, colour: int, rows: bytes) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def webp(kind: bytes, body: bytes) -> bytes:
    chunk_ = kind + struct.pack("<I", len(body)) + body
    return b"RIFF" + struct.pack("<I", 4 + len(chunk_)) + b"WEBP" + chunk_


def reason(image: bytes) -> str:
    with pytest.raises(ImageError) as refused:
        pixels_of(image, GREY)
    return str(refused.value)


@pytest.mark.parametrize("format_", FORMATS)
def test_a_colour_picture_becomes_grey_by_luminance(format_: str) -> None:
    picture = smooth_picture()
    assert np.abs(decoded(saved(picture, format_)) - grey_of(picture)).max() <= 2


def test_raw_pixels_stay_what_they_are() -> None:
    pixels = bytes(number % 256 for number in range(HEIGHT * WIDTH))
    assert pixels_of(pixels, GREY) == pixels
    like_a_jpeg = b"\xff\xd8\xff" + pixels[3:]
    assert pixels_of(like_a_jpeg, GREY) == like_a_jpeg


@pytest.mark.parametrize("format_", FORMATS)
def test_a_file_of_as_many_bytes_as_the_model_has_pixels_is_a_file(format_: str) -> None:
    picture = saved(smooth_picture(), format_)
    assert pixels_of(picture, PixelFormat(1, len(picture))) != picture


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize(
    ("orientation", "stored"),
    [
        (2, Image.Transpose.FLIP_LEFT_RIGHT),
        (3, Image.Transpose.ROTATE_180),
        (4, Image.Transpose.FLIP_TOP_BOTTOM),
        (5, Image.Transpose.TRANSPOSE),
        (6, Image.Transpose.ROTATE_90),
        (7, Image.Transpose.TRANSVERSE),
        (8, Image.Transpose.ROTATE_270),
    ],
)
def test_the_orientation_that_a_camera_noted_is_applied(
    format_: str, orientation: int, stored: Image.Transpose
) -> None:
    picture = smooth_picture()
    exif = Image.Exif()
    exif[0x0112] = orientation
    turned = saved(picture.transpose(stored), format_, exif=exif)
    assert np.abs(decoded(turned) - grey_of(picture)).max() <= 2


def test_damaged_metadata_is_not_the_pictures_end() -> None:
    picture = smooth_picture()
    damaged = saved(picture, "PNG", exif=b"Exif\0\0II*\0\xff\xff\xff\x7f")
    assert np.abs(decoded(damaged) - grey_of(picture)).max() <= 1


def test_16_bits_are_scaled_not_cut_off() -> None:
    picture = smooth_picture()
    grey, colour = grey_of(picture), np.asarray(picture)
    grey16 = Image.fromarray((grey * 257).astype(np.uint16))
    assert grey16.mode.startswith("I;16")
    assert np.array_equal(decoded(saved(grey16, "PNG")), grey)
    rows = b"".join(b"\0" + (row.astype(">u2") * 257).tobytes() for row in colour)
    assert np.abs(decoded(png(WIDTH, HEIGHT, 16, 2, rows)) - grey).max() <= 1


def test_cmyk_palettes_and_single_bits_are_read() -> None:
    picture = smooth_picture()
    grey = grey_of(picture)
    assert np.abs(decoded(saved(picture.convert("CMYK"), "JPEG")) - grey).max() <= 3
    assert np.abs(decoded(saved(picture.quantize(256), "PNG")) - grey).mean() < 8
    assert set(np.unique(decoded(saved(picture.convert("1"), "PNG")))) == {0, 255}


def test_transparency_lies_over_black() -> None:
    picture = smooth_picture()
    grey = grey_of(picture)
    half = picture.convert("RGBA")
    half.putalpha(128)
    for image in (saved(half, "PNG"), saved(half, "WEBP"), saved(half.convert("LA"), "PNG")):
        assert np.abs(decoded(image) - grey * 128 / 255).max() <= 2
    palette = saved(picture.quantize(256), "PNG", transparency=bytes(256))
    assert decoded(palette).max() == 0
    white = Image.new("L", (WIDTH, HEIGHT), 255)
    assert decoded(saved(white, "PNG", transparency=255)).max() == 0


def test_a_picture_is_stretched_and_a_pixel_is_the_mean_of_what_it_covers() -> None:
    small = np.arange(HEIGHT * WIDTH).reshape(HEIGHT, WIDTH) % 256
    for rows, columns in ((1, 1), (4, 4), (3, 10)):
        large = np.kron(small, np.ones((rows, columns))).astype(np.uint8)
        assert np.array_equal(decoded(saved(Image.fromarray(large), "PNG")), small)
    halves = Image.fromarray(np.tile(np.array([[0, 100]], dtype=np.uint8), (4, 8)))
    assert set(np.unique(decoded(saved(halves, "PNG"), 2, 8))) == {50}


BOMB_SIDE = 50_000
VP8X = webp(b"VP8X", bytes(4) + 2 * (BOMB_SIDE - 1).to_bytes(3, "little") + bytes(50))
VP8L = webp(b"VP8L", b"\x2f" + (16_382 | 16_382 << 14).to_bytes(4, "little") + bytes(50))
VP8 = webp(b"VP8 ", b"\x10\0\0\x9d\x01\x2a" + 2 * (16_383).to_bytes(2, "little") + bytes(50))


def jpeg_header(side: int) -> bytes:
    whole = saved(Image.new("L", (8, 8)), "JPEG")
    at = whole.index(b"\xff\xc0") + 5
    return whole[:at] + struct.pack(">HH", side, side) + whole[at + 4 :]


@pytest.mark.parametrize(
    "bomb",
    [
        png(BOMB_SIDE, BOMB_SIDE, 8, 2, b""),
        png(BOMB_SIDE, BOMB_SIDE, 1, 0, bytes(6_251 * 2_000)),
        png(2**31 - 1, 2**31 - 1, 8, 6, b""),
        jpeg_header(50_000),
        VP8X,
        VP8L,
        VP8,
        png(MAX_PIXELS + 1, 1, 8, 0, b""),
    ],
    ids=["png", "png-with-rows", "png-largest", "jpeg", "webp-extended", "webp-lossless", "webp-lossy", "one-too-many"],
)
def test_a_bomb_is_refused_by_its_header_before_there_is_memory_for_its_pixels(
    bomb: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def take_memory(*_given: object) -> None:
        raise AssertionError("memory for the pixels")

    # Where Pillow allocates them: a WebP's when it is opened, all others' when they are loaded.
    monkeypatch.setattr(WebPImageFile, "_open", take_memory)
    monkeypatch.setattr(ImageFile.ImageFile, "load", take_memory)
    assert re.fullmatch(rf"the \w+ has \d+ x \d+ pixels; at most {MAX_PIXELS} are taken", reason(bomb))


def test_the_largest_picture_is_taken() -> None:
    side = 4_096
    assert side * side == MAX_PIXELS
    assert decoded(saved(Image.new("L", (side, side), 200), "PNG")).min() == 200


def test_a_jpeg_of_very_many_scans_is_refused() -> None:
    progressive = saved(smooth_picture(64, 64), "JPEG", progressive=True)
    assert 2 <= progressive.count(b"\xff\xda") <= MAX_JPEG_SCANS
    assert decoded(progressive).std() > 0
    assert "scans; at most" in reason(progressive[:-2] + b"\xff\xda" * MAX_JPEG_SCANS + b"\xff\xd9")


def test_a_large_jpeg_of_many_scans_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each scan costs time for every pixel, even if it takes ten bytes."""
    whole = saved(Image.new("RGB", (4_096, 4_096), (9, 9, 9)), "JPEG", progressive=True)
    last = whole[whole.rfind(b"\xff\xda") : -2]
    scans = whole.count(b"\xff\xda")
    most = MAX_SCANNED_PIXELS // MAX_PIXELS
    assert decoded(whole[:-2] + (most - scans) * last + b"\xff\xd9").std() == 0

    def decode(*_given: object) -> None:
        raise AssertionError("it is decoded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", decode)
    bomb = whole[:-2] + (most - scans + 1) * last + b"\xff\xd9"
    assert reason(bomb) == (
        f"the JPEG has 4096 x 4096 pixels in {most + 1} scans; "
        f"at most {MAX_SCANNED_PIXELS} pixels times scans are taken"
    )


def test_scans_of_a_thumbnail_are_none_of_the_picture() -> None:
    thumbnail = saved(smooth_picture(64, 64), "JPEG", progressive=True)
    whole = saved(smooth_picture(), "JPEG")
    segment = b"\xff\xe1" + struct.pack(">H", 2 + len(thumbnail)) + thumbnail
    header = image_header(whole[:2] + segment + whole[2:])
    assert header is not None
    assert (header.width, header.height) == (WIDTH, HEIGHT)
    assert header.scans(whole[:2] + segment + whole[2:]) == 1


@pytest.mark.parametrize("format_", FORMATS)
def test_a_model_of_three_colours_gets_them(format_: str) -> None:
    picture = smooth_picture()
    assert np.abs(coloured(saved(picture, format_)) - np.asarray(picture).astype(np.int64)).max() <= 3


def test_every_kind_of_picture_becomes_rgb() -> None:
    picture = smooth_picture()
    colours, grey = np.asarray(picture).astype(np.int64), grey_of(picture)
    assert np.abs(coloured(saved(picture.convert("CMYK"), "JPEG")) - colours).max() <= 4
    assert np.abs(coloured(saved(picture.quantize(256), "PNG")) - colours).mean() < 8
    assert set(np.unique(coloured(saved(picture.convert("1"), "PNG")))) == {0, 255}
    grey16 = Image.fromarray((grey * 257).astype(np.uint16))
    for image in (grey16, picture.convert("L")):
        assert np.abs(coloured(saved(image, "PNG")) - grey[:, :, None]).max() <= 1
    half = picture.convert("RGBA")
    half.putalpha(128)
    assert np.abs(coloured(saved(half, "PNG")) - colours * 128 / 255).max() <= 2
    assert np.abs(coloured(saved(half.convert("LA"), "PNG")) - grey[:, :, None] * 128 / 255).max() <= 2
    assert coloured(saved(picture.quantize(256), "PNG", transparency=bytes(256))).max() == 0


def test_raw_colours_stay_what_they_are_and_grey_ones_are_not_enough() -> None:
    pixels = bytes(number % 251 for number in range(3 * HEIGHT * WIDTH))
    assert pixels_of(pixels, RGB) == pixels
    with pytest.raises(ImageError, match=rf"or {HEIGHT} x {WIDTH} RGB pixels, {3 * HEIGHT * WIDTH} bytes; got 384"):
        pixels_of(bytes(HEIGHT * WIDTH), RGB)


@pytest.mark.parametrize(
    "nothing", [png(0, 8, 8, 0, b""), png(8, 0, 8, 2, b""), jpeg_header(0)], ids=["no-width", "no-height", "jpeg"]
)
def test_a_picture_without_pixels_is_refused(nothing: bytes) -> None:
    assert "pixels, which is none" in reason(nothing)


@pytest.mark.parametrize("filler", [b"\xff", b"\xff\xe1\0\x02", b"\xff\xd0"])
def test_a_header_is_not_looked_for_without_end(filler: bytes) -> None:
    whole = saved(smooth_picture(), "JPEG")
    assert image_header(whole[:2] + 10 * filler + whole[2:]) is not None
    endless = whole[:2] + 10_000 * filler + whole[2:]
    assert image_header(endless) is None
    assert reason(endless) == "the JPEG cannot be decoded: it is damaged or incomplete"


@given(st.sampled_from([b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"RIFF\0\0\0\0WEBP", b""]), st.binary(max_size=200))
def test_any_bytes_have_a_header_or_none(start: bytes, rest: bytes) -> None:
    image = start + rest
    header = image_header(image)
    assert header is None or header.scans(image) >= 1
    assert image_tokens(image) >= LEAST_IMAGE_TOKENS


def test_an_image_costs_by_its_pixels_or_by_its_bytes_if_they_are_more() -> None:
    flat = saved(Image.new("L", (1_024, 1_024)), "PNG")
    assert len(flat) < 5_000
    assert image_tokens(flat) == LEAST_IMAGE_TOKENS + 1_024
    assert image_tokens(bytes(64)) == image_tokens(b"") == LEAST_IMAGE_TOKENS
    assert image_tokens(bytes(10_240)) == LEAST_IMAGE_TOKENS + 10
    assert image_tokens(png(BOMB_SIDE, BOMB_SIDE, 8, 2, b"")) == LEAST_IMAGE_TOKENS, "it is refused, not charged"
    stuffed = png(8, 8, 8, 0, bytes(72))
    assert image_tokens(stuffed[:33] + chunk(b"tEXt", bytes(20_000)) + stuffed[33:]) == LEAST_IMAGE_TOKENS + 19


@pytest.mark.parametrize("format_", ["PNG", "WEBP"])
def test_an_animation_is_refused(format_: str) -> None:
    picture = smooth_picture()
    frames = saved(picture, format_, save_all=True, append_images=[picture.transpose(Image.Transpose.ROTATE_180)])
    assert reason(frames).endswith("is animated; one still picture is needed")


@pytest.mark.parametrize("format_", FORMATS)
def test_a_file_that_breaks_off_is_refused_wherever_it_does(format_: str) -> None:
    whole = saved(smooth_picture(), format_)
    # The end of a PNG holds checksums and no pixels.
    said = {reason(whole[:length]) for length in range(16, len(whole) - 30, 7)}
    assert said == {f"the {format_.replace('WEBP', 'WebP')} cannot be decoded: it is damaged or incomplete"}


@pytest.mark.parametrize("format_", FORMATS)
def test_damaged_bytes_are_decoded_or_refused_and_nothing_else(format_: str) -> None:
    whole = saved(smooth_picture(), format_)
    chance = random.Random(20)
    refused = 0
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(chance.choice((1, 3, 20))):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        try:
            assert len(pixels_of(bytes(damaged), GREY)) == HEIGHT * WIDTH
        except ImageError:
            refused += 1
    assert refused > 0


@pytest.mark.parametrize(
    "garbage",
    [b"", b"hello", bytes(HEIGHT * WIDTH + 1), b"GIF89a" + bytes(20), b"<svg/>", b"\xff\xd8", b"RIFF\0\0\0\0WAVE"],
)
def test_what_is_no_picture_is_said_to_be_none_without_quoting_it(garbage: bytes) -> None:
    assert reason(garbage) == (
        f"must be a PNG, JPEG or WebP file, or {SIZE}, {HEIGHT * WIDTH} bytes; "
        f"got {len(garbage)} bytes of something else"
    )


def test_memory_that_runs_out_is_not_the_pictures_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*_given: object) -> None:
        raise MemoryError

    monkeypatch.setattr(Image.Image, "convert", out_of_memory)
    with pytest.raises(MemoryError):
        pixels_of(saved(smooth_picture(), "PNG"), GREY)
