"""Key-value cache of a generating batch; rows leave without copying the others.

transformers' DynamicCache concatenates every layer at every step: measured on a CPU with a batch of 32 and 500
tokens of context, that took longer than the matrix products of the step. Here a step writes into its place.
"""

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

_NAME = "fairlane_sdpa"


def use_grouped_attention(network: PreTrainedModel) -> None:
    """Make a model that uses torch's scaled dot product attention use it without copies; others are left as they are.

    With a mask transformers repeats the keys and values for every query head, at every step and in every layer. On a
    CPU with a batch of 32 and 500 tokens of context that was half of the time.
    """
    if network.config._attn_implementation != "sdpa":
        return
    AttentionInterface.register(_NAME, _attend)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    network.set_attn_implementation(_NAME)


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: object,
) -> tuple[torch.Tensor, None]:
    """Shapes: query (rows, query heads, 1, size), key and value (rows, key heads, columns, size).

    The query heads that share a key head have the same mask, so they are handed over as if they were so many
    positions of one head. Anything but a single position goes transformers' way, and so does a bias by position.
    """
    rows, heads, length, size = query.shape
    key_heads = key.shape[1]
    if length > 1 or heads == key_heads or options.get("position_bias") is not None:
        done: tuple[torch.Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return done
    scale = options.get("scaling")
    attended = torch.nn.functional.scaled_dot_product_attention(
        query.view(rows, key_heads, heads // key_heads, size),
        key,
        value,
        attn_mask=attention_mask,
        scale=scale if isinstance(scale, float) else None,
    )
    return attended.reshape(rows, 1, heads, value.shape[3]), None


_FIRST_ROOM = 128
_GROWTH = 1.5


class _Layer(CacheLayerMixin):  # type: ignore[misc] # transformers is not typed
    """One layer's buffers, of shape (rows, heads, capacity, head size)."""

    is_sliding = False

    def __init__(self, rows: int, cache: "BatchCache") -> None:
        super().__init__()
        self._rows = rows
        self._cache = cache

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.keys = self._room_like(key_states)
        self.values = self._room_like(value_states)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: object, **_kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        elif self.keys.shape[2] < self._cache.capacity:
            self.keys, self.values = self._grown(self.keys), self._grown(self.values)
        rows, start, at = self._cache.rows, self._cache.start, self._cache.at
        end = at + key_states.shape[2]
        self.keys[rows, :, at:end] = key_states
        self.values[rows, :, at:end] = value_states
        return self.keys[rows, :, start:end], self.values[rows, :, start:end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self._cache.at - self._cache.start

    def get_max_length(self) -> int:
        return -1

    def move(self, source: int, target: int, columns: slice) -> None:
        for buffer in (self.keys, self.values):
            buffer[target, :, columns] = buffer[source, :, columns]

    def _room_like(self, states: torch.Tensor) -> torch.Tensor:
        # Zeros, because what is masked still is multiplied: by zero, which makes not-a-number of garbage.
        return states.new_zeros(self._rows, states.shape[1], self._cache.capacity, states.shape[3])

    def _grown(self, buffer: torch.Tensor) -> torch.Tensor:
        grown = self._room_like(buffer)
        grown[:, :, : buffer.shape[2]] = buffer
        return grown


class BatchCache:
    """The cache of ``rows`` rows whose prompts end at the column ``width``; at most ``most_columns`` are ever needed.

    Prompts are aligned at their ends, so that every row writes its next token into the same column. ``for_network``
    is what a transformers model takes as ``past_key_values``.
    """

    def __init__(self, rows: int, width: int, most_columns: int) -> None:
        self._most_columns = most_columns
        # The next pass: some rows, from column ``start``, written from ``at`` on.
        self.rows = slice(0, rows)
        self.start = self.at = 0
        self.capacity = min(most_columns, width + _FIRST_ROOM)
        self.for_network = Cache(layer_class_to_replicate=lambda: _Layer(rows, self))

    def look_at(self, rows: slice, start: int, at: int, columns: int) -> None:
        """The next pass is about these rows: it attends from ``start`` on and writes ``columns`` from ``at`` on."""
        self.rows, self.start, self.at = rows, start, at
        if at + columns > self.capacity:
            self.capacity = min(self._most_columns, max(at + columns, int(self.capacity * _GROWTH)))

    def move(self, source: int, target: int, columns: slice) -> None:
        """Row ``target``, which is no longer needed, becomes row ``source``."""
        for layer in self.for_network.layers:
            layer.move(source, target, columns)
