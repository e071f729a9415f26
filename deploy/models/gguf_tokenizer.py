"""The tokenizer that a GGUF file describes, built from what stands in the file.

The conversion of transformers is not used: it differs from release to release, and 5.17 takes the token that begins a
turn for the one that ends it.
"""

from pathlib import Path
from typing import Any

_CONTROL = 3
"""``tokenizer.ggml.token_type`` of a token that is no text: llama.cpp, ``LLAMA_TOKEN_TYPE_CONTROL``."""


def save_tokenizer(gguf: Path, folder: Path) -> None:
    """Write tokenizer.json, its configuration and the chat template of a byte-level BPE into ``folder``.

    Raises ValueError for another kind of tokenizer, or a file that does not name its vocabulary.
    """
    from gguf import GGUFReader
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    fields = GGUFReader(gguf).fields

    def field(name: str) -> Any:
        if name not in fields:
            raise ValueError(f"{gguf.name}: has no {name}")
        return fields[name].contents()

    kind = (field("tokenizer.ggml.model"), field("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise ValueError(f"{gguf.name}: its tokenizer is {kind[0]} with {kind[1]}, not gpt2 with smollm")
    tokens: list[str] = field("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in field("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: place for place, token in enumerate(tokens)}, merges=merges))
    # llama.cpp, LLAMA_VOCAB_PRE_TYPE_SMOLLM: every digit alone, then the words of GPT-2.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = field("tokenizer.ggml.token_type")
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    roles = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    names = {f"{role}_token": tokens[field(f"tokenizer.ggml.{name}_token_id")] for role, name in roles.items()}
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=field("tokenizer.chat_template"),
        model_max_length=field("llama.context_length"),
        clean_up_tokenization_spaces=False,
        **names,
    ).save_pretrained(folder)
