"""Small tokenizers and model folders without weights, for tests of the front."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CORPUS = [
    "hello world, this is a small corpus of text about the sky and the sea",
    "user system assistant hello hi there. What is the capital of France?",
    "你好世界 \U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea naïve café 龤",
]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + "
    "message['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# In the style of Qwen3: tools in the system turn, calls as JSON, reasoning only since the last
# question, an empty one where thinking is switched off.
QWEN3_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- 'You may call these functions:' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '\\nTo call one, write\\n<tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call>' }}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=0) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'assistant' %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if thought and loop.index0 > ns.last %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {%- if content or not loop.first %}{{- '\\n' }}{%- endif %}
            {%- set call = call.function if call.function else call %}
            {{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + content }}
        {{- '\\n</tool_response><|im_end|>\\n' }}
    {%- elif not (message.role == 'system' and loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- elif enable_thinking is defined %}{{- '<think>\\n' }}{%- endif %}
{%- endif %}
"""


def byte_level() -> Tokenizer:
    """As of GPT-2 and Qwen; <think> is markup but not special, a blank added token is text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    tokenizer.add_tokens(
        [AddedToken(text, special=False, normalized=False) for text in ("<think>", "</think>")]
    )
    tokenizer.add_tokens([AddedToken("\n\n\n", special=False, normalized=False)])
    return tokenizer


def sentencepiece() -> dict[str, Any]:
    """As of Llama 2: spaces are U+2581, unknown characters bytes, a begin token is put before."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += list("\u2581abcdehlortw") + ["he", "ll", "\u2581w", "or", "hell"]
    special = [
        {
            "id": i,
            "content": pieces[i],
            "special": True,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for i in range(3)
    ]
    frame = {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "version": "1.0",
        "added_tokens": special,
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "\u2581"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
            ],
        },
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, frame],
            "pair": [frame, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": {piece: i for i, piece in enumerate(pieces)},
            "merges": ["h e", "l l", "\u2581 w", "o r", "he ll"],
        },
    }


def write_byte_level(folder: Path) -> Path:
    path = folder / "tokenizer.json"
    path.write_text(byte_level().to_str())
    return path


def write_sentencepiece(folder: Path) -> Path:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(sentencepiece()))
    return path


def write_model(folder: Path, template: str | None = CHAT_TEMPLATE, **config: Any) -> Path:
    """A folder that the front can serve: byte-level tokenizer, end id 2, vocabulary 512."""
    write_byte_level(folder)
    values = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 512,
        "max_position_embeddings": 2048,
        "eos_token_id": 2,
        **config,
    }
    write_json(folder / "config.json", values)
    tokenizer = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": template}
    write_json(folder / "tokenizer_config.json", tokenizer)
    return folder


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))
