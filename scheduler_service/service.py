"""What the API does, free of protobuf: reads prompts, validates, submits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .chat_template import ChatTemplate
from .engine import Engine
from .errors import InvalidArgumentError, UnavailableError
from .generate_call import GenerateCall
from .generation import Generation
from .model_files import ModelInfo, read_model_info
from .prompts import PromptReader
from .text_stream import TextStream
from .tokenizer import Tokenizer
from .validation import Limits, check_call, make_request, text_options


@dataclass(frozen=True, slots=True)
class Model:
    """The front's part of a checkpoint."""

    info: ModelInfo
    tokenizer: Tokenizer
    reader: PromptReader


def load_model(folder: Path, served_name: str) -> Model:
    """Reads the small files of a checkpoint; blocks for up to a second. ModelFilesError."""
    tokenizer_path = folder / "tokenizer.json"
    tokenizer = Tokenizer(tokenizer_path)
    info = read_model_info(folder, served_name, tokenizer.token_id)
    template = None
    if info.chat_template is not None:
        template = ChatTemplate(info.chat_template, info.special_tokens)
    return Model(info, tokenizer, PromptReader(tokenizer, template, info.vocab_size))


@dataclass(slots=True)
class Rejections:
    """Requests refused before the engine saw them."""

    invalid: int = 0
    unavailable: int = 0


class InferenceService:
    """Joins a model's front and an engine."""

    def __init__(self, model: Model, engine: Engine) -> None:
        self.model = model
        self.engine = engine
        self.rejections = Rejections()

    def limits(self) -> Limits:
        """UnavailableError until the workers have reported their geometry."""
        geometry = self.engine.info().geometry
        info = self.model.info
        return Limits(
            vocab_size=info.vocab_size,
            max_seq_len=geometry.max_seq_len,
            end_token_ids=frozenset(info.end_token_ids),
            default_sampling=info.default_sampling,
        )

    async def begin(self, call: GenerateCall, deadline_ns: int | None) -> Generation:
        """Validates and submits. The caller must leave the Generation's `async with`.

        InvalidArgumentError, DuplicateRequestError, QueueFullError or UnavailableError.
        """
        arrival_ns = self.engine.now_ns()
        try:
            limits = self.limits()
        except UnavailableError:
            self.rejections.unavailable += 1
            raise
        try:
            check_call(call, limits)
            ids = await self.model.reader.prompt(call.prompt, limits.max_seq_len - 1)
            request = make_request(call, ids, limits, arrival_ns, deadline_ns)
        except InvalidArgumentError:
            self.rejections.invalid += 1
            raise
        text = TextStream(
            self.model.tokenizer.detokenizer(at_text_start=call.is_chat),
            text_options(call, request),
        )
        return Generation(self.engine, request, self.engine.submit(request), text)
