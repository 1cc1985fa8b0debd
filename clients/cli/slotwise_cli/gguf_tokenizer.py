"""The tokenizer of a GGUF file as a Hugging Face `tokenizer.json` and `tokenizer_config.json`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from .errors import CliError

# GGUF token types: 3 is a control token, 4 a user-defined one; both are matched as a whole.
CONTROL, USER_DEFINED = 3, 4


def build_tokenizer(fields: Mapping[str, Any]) -> Tokenizer:
    """The byte-level BPE tokenizer described by `tokenizer.ggml.*` metadata.

    Only the kind that SmolLM2 uses is known: digits are split one by one, then GPT-2's rule.
    """
    kind = (fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"])
    if kind != ("gpt2", "smollm"):
        raise CliError(f"tokenizer kind {kind} is not known; known: ('gpt2', 'smollm')")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    merges = [_merge(line) for line in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    for token, token_type in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True):
        if token_type in (CONTROL, USER_DEFINED):
            added = AddedToken(token, special=token_type == CONTROL, normalized=False)
            tokenizer.add_tokens([added])
    return tokenizer


def write_tokenizer(fields: Mapping[str, Any], folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json (with the chat template) into `folder`."""
    build_tokenizer(fields).save(str(folder / "tokenizer.json"))
    tokens: list[str] = fields["tokenizer.ggml.tokens"]

    def named(role: str) -> str:
        token_id: int = fields[f"tokenizer.ggml.{role}_token_id"]
        return tokens[token_id]

    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "bos_token": named("bos"),
        "eos_token": named("eos"),
        "unk_token": named("unknown"),
        "pad_token": named("padding"),
        "model_max_length": fields["llama.context_length"],
        "chat_template": fields["tokenizer.chat_template"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _merge(line: str) -> tuple[str, str]:
    left, _, right = line.partition(" ")
    return left, right
