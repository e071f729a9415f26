"""Vectors of overlapping windows of texts, from a sentence encoder, for classifiers of texts of any length."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from torch.nn.functional import normalize
from transformers import AutoModel

from inference_consumers.engines.encoders import Pooling
from inference_consumers.engines.windows import Window, WindowSize

_GROUP_TOKENS = 1_024
"""As for embeddings (``encoders``): larger groups were no faster on a CPU."""


class WindowEncoder:
    """A transformers folder of an encoder; the vector is the normalized mean of a window's tokens.

    Args:
        folder: with config.json, model.safetensors and tokenizer.json; nothing is fetched.
        size: the windows; the folder's model must have positions for them.

    Raises:
        OSError: a file is missing or cannot be read.
        ValueError: the weights or the tokenizer do not fit.
    """

    def __init__(self, folder: Path, size: WindowSize) -> None:
        self.size = size
        tokenizer = Tokenizer.from_str((folder / "tokenizer.json").read_text(encoding="utf-8"))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        # A tenant's text must not be able to write the model's own tokens.
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        self._network = AutoModel.from_pretrained(folder, local_files_only=True, use_safetensors=True).eval()
        self._begin, self._end = (_special(tokenizer, token) for token in ("[CLS]", "[SEP]"))
        self._pooling = Pooling()

    def encode(self, texts: Sequence[str], *, sentences: bool = True) -> tuple[list[Window], npt.NDArray[np.float32]]:
        """The windows of each text in turn, and a row for each. A text without tokens has no window.

        With ``sentences``, each sentence of a text is a window too.

        Texts must be encodable as UTF-8.
        """
        windows: list[Window] = []
        rows: list[list[int]] = []
        for number, encoding in enumerate(self._tokenizer.encode_batch(list(texts), add_special_tokens=False)):
            ids, offsets = encoding.ids, encoding.offsets
            cut = self.size.cut_with_sentences(texts[number], offsets) if sentences else self.size.cut(len(ids))
            for first, last in cut:
                windows.append(Window(number, offsets[first][0], offsets[last - 1][1]))
                rows.append([self._begin, *ids[first:last], self._end])
        vectors = np.zeros((len(rows), self._network.config.hidden_size), dtype=np.float32)
        for group in _groups([len(row) for row in rows]):
            vectors[group] = self._vectors([rows[place] for place in group])
        return windows, vectors

    def _vectors(self, rows: Sequence[Sequence[int]]) -> npt.NDArray[np.float32]:
        shape = len(rows), max(map(len, rows))
        ids, mask = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
        for number, row in enumerate(rows):
            ids[number, : len(row)] = torch.tensor(row)
            mask[number, : len(row)] = 1
        with torch.inference_mode():
            hidden = self._network(input_ids=ids, attention_mask=mask).last_hidden_state
            vectors: npt.NDArray[np.float32] = normalize(self._pooling.pool(hidden, mask), dim=-1).numpy()
        return vectors


def _special(tokenizer: Tokenizer, token: str) -> int:
    number = tokenizer.token_to_id(token)
    if number is None:
        raise ValueError(f"the tokenizer has no {token}")
    return int(number)


def _groups(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Places by rising length, cut where a group would exceed its tokens with padding."""
    group: list[int] = []
    for place in sorted(range(len(lengths)), key=lengths.__getitem__):
        if group and (len(group) + 1) * lengths[place] > _GROUP_TOKENS:
            yield group
            group = []
        group.append(place)
    if group:
        yield group
