"""``model.json`` of a classifier of pictures: its labels and its input format."""

import json
from pathlib import Path

from fairlane_server.image_header import MAX_PIXELS
from inference_consumers.engines.images import PixelFormat
from inference_consumers.engines.protocol import EngineSpec


def read_picture_labels(spec: EngineSpec, file: Path) -> tuple[tuple[str, ...], PixelFormat]:
    """The labels, in the order of the logits, and the pixels that the model takes. Raises EngineLoadError."""
    try:
        described = json.loads(file.read_text(encoding="utf-8"))
        labels, height, width = described["labels"], described["height"], described["width"]
        channels = described.get("channels", 1)
    except KeyError as error:
        raise spec.error(f"{file} has no {error}") from error
    except (OSError, ValueError, TypeError) as error:
        raise spec.error(f"{file} cannot be loaded: {error}") from error
    if not isinstance(labels, list) or not labels or not all(isinstance(label, str) for label in labels):
        raise spec.error(f"{file}: labels must be a list of strings")
    if len(set(labels)) < len(labels):
        raise spec.error(f"{file}: a label is listed twice")
    for name, side in (("height", height), ("width", width)):
        if type(side) is not int or side < 1:
            raise spec.error(f"{file}: {name} must be a whole number from 1, not {side!r}")
    if type(channels) is not int or channels not in {1, 3}:
        raise spec.error(f"{file}: channels must be 1 (grey) or 3 (RGB), not {channels!r}")
    if height * width > MAX_PIXELS:
        raise spec.error(f"{file}: {height} x {width} pixels are more than {MAX_PIXELS}")
    return tuple(labels), PixelFormat(height, width, channels)
