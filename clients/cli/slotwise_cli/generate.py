"""`slotwise generate` and `slotwise chat`: one answer, or a conversation."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, cast

import typer

from slotwise_client import (
    Accepted,
    Chat,
    Client,
    Delta,
    Finished,
    FinishReason,
    GenerateOptions,
    Message,
    Prompt,
    SlotwiseError,
    Stream,
    Timings,
    Usage,
)

from .output import CliError, Output
from .serve import DEFAULT_SERVER, JsonFlag, ServerOption

SystemOption = Annotated[str | None, typer.Option(help="System message of the chat.")]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy.")]
TopP = Annotated[float | None, typer.Option(help="Keep the most likely tokens up to this sum.")]
TopK = Annotated[int | None, typer.Option(help="Keep this many most likely tokens.")]
MinP = Annotated[float | None, typer.Option(help="Keep tokens at least this likely, relatively.")]
Seed = Annotated[int | None, typer.Option(help="Key of the draw; the same seed, the same answer.")]
MaxNewTokens = Annotated[int | None, typer.Option(help="Most tokens to generate.")]
Stop = Annotated[list[str] | None, typer.Option(help="Stop at this text; may be repeated.")]


@dataclass(slots=True)
class Answer:
    """What a stream has said so far; whole once it has a `finish_reason`."""

    request_id: str = ""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    seed: int | None = None
    finish_reason: FinishReason | None = None
    matched_stop: str | int | None = None
    usage: Usage | None = None
    timings: Timings | None = None


@dataclass(frozen=True, slots=True)
class _Talk:
    """What stays the same through a conversation."""

    system: str | None
    options: GenerateOptions


def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="Raw prompt; `-`, or none, reads standard input.")
    ] = None,
    chat: Annotated[str | None, typer.Option(help="Ask this as a chat message instead.")] = None,
    system: SystemOption = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    seed: Seed = None,
    max_new_tokens: MaxNewTokens = None,
    stop: Stop = None,
    ignore_eos: Annotated[bool, typer.Option(help="Go on past the model's end ids.")] = False,
    request_id: Annotated[str | None, typer.Option(help="Your name for the request.")] = None,
    timeout: Annotated[float | None, typer.Option(help="Deadline in seconds.")] = None,
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonFlag = False,
) -> None:
    """Generate one answer; streams it as text, or prints one JSON object with --json."""
    output = Output(as_json)
    options = given(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        max_new_tokens=max_new_tokens,
        stop=stop,
        ignore_eos=ignore_eos or None,
        request_id=request_id,
    )
    source = _prompt(prompt, chat, system)
    answer = Answer()
    with Client(server) as client, client.generate(source, timeout=timeout, **options) as stream:
        follow(stream, output, answer)
    if as_json:
        output.json(asdict(answer))
    elif not answer.text.endswith("\n"):
        output.text("\n")


def chat(
    system: SystemOption = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    seed: Seed = None,
    max_new_tokens: MaxNewTokens = None,
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonFlag = False,
) -> None:
    """Talk with the model. /reset forgets the conversation, /exit ends; Ctrl-C stops an answer."""
    output = Output(as_json)
    options = given(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        max_new_tokens=max_new_tokens,
    )
    talk = _Talk(system, options)
    with Client(server) as client:
        model = client.model_info(timeout=10)
        if not model.has_chat_template:
            raise CliError(f"{model.name} has no chat template; use `slotwise generate`")
        output.note(f"{model.name} on {server}; /reset forgets, /exit ends, Ctrl-C stops an answer")
        history: list[Message] = []
        for question in _questions(output):
            if question == "/reset":
                history = []
                output.note("forgotten")
                continue
            history.append(Message("user", question))
            _converse(client, history, talk, output)


def given(**options: Any) -> GenerateOptions:
    """The options that were set on the command line."""
    chosen = {name: value for name, value in options.items() if value is not None}
    return cast(GenerateOptions, chosen)


def follow(stream: Stream, output: Output, answer: Answer) -> None:
    """Read a stream to its end into `answer`; show its text as it comes unless JSON is wanted."""
    for event in stream:
        answer.request_id = event.request_id
        match event:
            case Accepted():
                answer.seed = event.seed
            case Delta():
                answer.text += event.text
                answer.token_ids += event.token_ids
                if not output.as_json:
                    output.text(event.text)
            case Finished():
                answer.finish_reason = event.finish_reason
                answer.matched_stop = event.matched_stop
                answer.usage = event.usage
                answer.timings = event.timings


def _prompt(prompt: str | None, chat: str | None, system: str | None) -> Prompt:
    if chat is not None:
        if prompt is not None:
            raise CliError("give a raw prompt or --chat, not both", exit_code=2)
        return Chat.of(chat, system=system)
    if system is not None:
        raise CliError("--system belongs to --chat; a raw prompt has none", exit_code=2)
    if prompt is None or prompt == "-":
        if sys.stdin.isatty():
            raise CliError("no prompt: give one, --chat TEXT, or text on stdin", exit_code=2)
        return sys.stdin.read()
    return prompt


def _questions(output: Output) -> Iterator[str]:
    """Lines of the user until /exit, the end of input, or Ctrl-C at the prompt."""
    mark = "" if output.as_json or not sys.stdin.isatty() else "> "
    while True:
        try:
            question = input(mark).strip()
        except (EOFError, KeyboardInterrupt):
            return
        if question == "/exit":
            return
        if question:
            yield question


def _converse(client: Client, history: list[Message], talk: _Talk, output: Output) -> None:
    """Answer the last message of `history` and append the answer; a refused one is taken back."""
    answer = Answer()
    try:
        with (
            _ctrl_c() as pressed,
            client.chat(history, system=talk.system, **talk.options) as stream,
        ):
            closer = threading.Thread(target=_close_when, args=(pressed, stream), daemon=True)
            closer.start()
            follow(stream, output, answer)
    except SlotwiseError as error:
        output.error(error.message)
        history.pop()
        return
    if answer.finish_reason is None:
        answer.finish_reason = FinishReason.CANCELLED
    history.append(Message("assistant", answer.text))
    if output.as_json:
        output.json(asdict(answer))
    else:
        output.text("\n")


@contextmanager
def _ctrl_c() -> Iterator[threading.Event]:
    """An event that Ctrl-C sets instead of raising; set at the end in any case.

    An exception in the middle of gRPC's own code could leave a call behind that nobody cancels.
    """
    pressed = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: pressed.set())
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)
        pressed.set()


def _close_when(pressed: threading.Event, stream: Stream) -> None:
    pressed.wait()
    stream.close()
