"""What the front needs of a checkpoint folder besides its tokenizer."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from .errors import InvalidArgumentError
from .json_file import JsonFile, ModelFilesError, read_bytes, read_text
from .sampling import (
    SamplingDefaults,
    check_min_p,
    check_repetition_penalty,
    check_temperature,
    check_top_p,
)

T = TypeVar("T", int, float)

# An int32 in the API.
MAX_TOP_K = (1 << 31) - 1
# The longest known has 20 KB.
MAX_TEMPLATE_BYTES = 1 << 20
# The largest known is 262,144; lists of all ids are made.
MAX_VOCAB_SIZE = 1 << 21

SPECIAL_TOKEN_KEYS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


FRONT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
)

# Settings of generation_config.json that would change tokens, and their value that changes nothing.
UNAPPLIED_NEUTRAL = {
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "num_beams": 1,
    "penalty_alpha": None,
    "min_new_tokens": 0,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "bad_words_ids": None,
}


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A checkpoint as its small files describe it."""

    name: str
    model_type: str
    architectures: tuple[str, ...]
    # Size of the logits; every token id is below it.
    vocab_size: int
    # Union of the end ids of tokenizer_config.json, config.json and generation_config.json, rising.
    end_token_ids: tuple[int, ...]
    bos_token_id: int | None
    default_sampling: SamplingDefaults
    # What generation_config.json asks for and this server does not do; for the log.
    unapplied: tuple[str, ...]
    # None: the checkpoint has none, and chat is refused.
    chat_template: str | None
    # Texts of bos_token, eos_token and so on: variables of the chat template.
    special_tokens: dict[str, str]


def front_hash(folder: Path) -> str:
    """SHA-256 of the files that make prompts of requests and texts of tokens. ModelFilesError."""
    digest = hashlib.sha256()
    for name in FRONT_FILES:
        if not (folder / name).exists():
            continue
        content = read_bytes(folder / name)
        digest.update(f"{name} {len(content)} ".encode())
        digest.update(content)
    return digest.hexdigest()


def read_model_info(
    folder: Path, served_name: str, token_id: Callable[[str], int | None]
) -> ModelInfo:
    """Reads config.json, generation_config.json, tokenizer_config.json and the chat template.

    token_id gives the id of a special token's text, None when the tokenizer lacks it. served_name
    "" means the folder's name. ModelFilesError names file, key and value.
    """
    if not folder.is_dir():
        raise ModelFilesError(f"{folder}: no such model folder")
    config = JsonFile.read(folder / "config.json")
    generation = JsonFile.read_optional(folder / "generation_config.json")
    tokenizer = JsonFile.read_optional(folder / "tokenizer_config.json")
    model_type, vocab_size = config.string("model_type"), config.integer("vocab_size", 1)
    if model_type is None:
        raise config.wrong("model_type", "a string")
    if vocab_size is None or vocab_size > MAX_VOCAB_SIZE:
        raise config.wrong("vocab_size", f"an integer from 1 to {MAX_VOCAB_SIZE:,}")
    sampling, unapplied = _sampling_defaults(generation)
    return ModelInfo(
        name=served_name or folder.resolve().name,
        model_type=model_type,
        architectures=config.strings("architectures"),
        vocab_size=vocab_size,
        end_token_ids=_end_token_ids(config, generation, tokenizer, vocab_size, token_id),
        bos_token_id=_bos_token_id(config, tokenizer, vocab_size, token_id),
        default_sampling=sampling,
        unapplied=unapplied,
        chat_template=_chat_template(folder, tokenizer),
        special_tokens=_special_tokens(tokenizer),
    )


def _end_token_ids(
    config: JsonFile,
    generation: JsonFile,
    tokenizer: JsonFile,
    vocab_size: int,
    token_id: Callable[[str], int | None],
) -> tuple[int, ...]:
    ids: set[int] = set()
    for file in (config, generation):
        found = file.token_ids("eos_token_id")
        if any(i >= vocab_size for i in found):
            raise file.wrong("eos_token_id", f"below the vocabulary size {vocab_size}")
        ids.update(found)
    own = _special_token_id(tokenizer, "eos_token", vocab_size, token_id)
    if own is not None:
        ids.add(own)
    return tuple(sorted(ids))


def _bos_token_id(
    config: JsonFile,
    tokenizer: JsonFile,
    vocab_size: int,
    token_id: Callable[[str], int | None],
) -> int | None:
    own = _special_token_id(tokenizer, "bos_token", vocab_size, token_id)
    if own is not None:
        return own
    ids = config.token_ids("bos_token_id")
    if len(ids) > 1 or any(i >= vocab_size for i in ids):
        raise config.wrong("bos_token_id", f"one id below the vocabulary size {vocab_size}")
    return ids[0] if ids else None


def _special_token_id(
    tokenizer: JsonFile, key: str, vocab_size: int, token_id: Callable[[str], int | None]
) -> int | None:
    text = tokenizer.token_text(key)
    if text is None:
        return None
    found = token_id(text)
    if found is None or found >= vocab_size:
        raise tokenizer.wrong(
            key, f"a token of tokenizer.json below the vocabulary size {vocab_size}"
        )
    return found


def _special_tokens(tokenizer: JsonFile) -> dict[str, str]:
    texts = {key: tokenizer.token_text(key) for key in SPECIAL_TOKEN_KEYS}
    return {key: text for key, text in texts.items() if text is not None}


def _chat_template(folder: Path, tokenizer: JsonFile) -> str | None:
    """chat_template.jinja wins over tokenizer_config.json; of several named ones, "default"."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return read_text(file, MAX_TEMPLATE_BYTES)
    value = tokenizer.raw("chat_template")
    if isinstance(value, str) and len(value) > MAX_TEMPLATE_BYTES:
        raise tokenizer.wrong("chat_template", f"of at most {MAX_TEMPLATE_BYTES:,} characters")
    if value is None or isinstance(value, str):
        return value
    try:
        named = {str(item["name"]): str(item["template"]) for item in value}
    except (TypeError, KeyError):
        raise tokenizer.wrong("chat_template", "a template or a list of named ones") from None
    if "default" not in named:
        raise tokenizer.wrong("chat_template", 'a list with one named "default"')
    return named["default"]


def _sampling_defaults(file: JsonFile) -> tuple[SamplingDefaults, tuple[str, ...]]:
    """The defaults of generation_config.json, and what it asks for that is not applied.

    A number in the file is the default, whatever do_sample says; greedy is asked for by
    temperature 0.
    """
    own = SamplingDefaults()
    top_k = file.integer("top_k", at_least=-1)
    if top_k is not None and top_k > MAX_TOP_K:
        raise file.wrong("top_k", f"at most {MAX_TOP_K}")
    numbers = {
        key: file.number(key) for key in ("temperature", "top_p", "min_p", "repetition_penalty")
    }
    merged = SamplingDefaults(
        temperature=_or(numbers["temperature"], own.temperature),
        top_p=_or(numbers["top_p"], own.top_p),
        top_k=max(0, _or(top_k, own.top_k)),
        min_p=_or(numbers["min_p"], own.min_p),
        repetition_penalty=_or(numbers["repetition_penalty"], own.repetition_penalty),
    )
    try:
        check_temperature(merged.temperature, "temperature")
        check_top_p(merged.top_p, "top_p")
        check_min_p(merged.min_p, "min_p")
        check_repetition_penalty(merged.repetition_penalty, "repetition_penalty")
    except InvalidArgumentError as error:
        raise ModelFilesError(f"{file.path}: {error}") from error
    return merged, _unapplied(file)


def _unapplied(file: JsonFile) -> tuple[str, ...]:
    asked = {key: file.raw(key) for key in UNAPPLIED_NEUTRAL}
    return tuple(
        f"{key} {value}"
        for key, value in asked.items()
        if value not in (None, UNAPPLIED_NEUTRAL[key])
    )


def _or(value: T | None, default: T) -> T:
    return default if value is None else value
