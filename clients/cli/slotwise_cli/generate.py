"""`slotwise generate` and `slotwise chat`: one answer, or a conversation."""

import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated

import typer

from slotwise_client import (
    Chat,
    Client,
    FinishReason,
    GenerateOptions,
    Message,
    Prompt,
    SlotwiseError,
)

from . import request_options as words
from .answer import Answer, answers_for, follow, show
from .connection import Connection, connects
from .interrupt import closed_by_signals
from .output import CliError, Output
from .serve import JsonFlag

SystemOption = Annotated[str | None, typer.Option(help="System message of the chat.")]


@dataclass(frozen=True, slots=True)
class _Talk:
    """What stays the same through a conversation."""

    system: str | None
    options: GenerateOptions
    verbose: bool


@connects
def generate(
    connection: Connection,
    prompt: Annotated[
        str | None, typer.Argument(help="Raw prompt; `-`, or none, reads standard input.")
    ] = None,
    chat: Annotated[str | None, typer.Option(help="Ask this as a chat message instead.")] = None,
    system: SystemOption = None,
    tools: words.Tools = None,
    template_kwargs: words.TemplateKwargs = None,
    parse_output: words.ParseOutput = False,
    temperature: words.Temperature = None,
    top_p: words.TopP = None,
    top_k: words.TopK = None,
    min_p: words.MinP = None,
    seed: words.Seed = None,
    frequency_penalty: words.FrequencyPenalty = None,
    presence_penalty: words.PresencePenalty = None,
    repetition_penalty: words.RepetitionPenalty = None,
    logit_bias: words.LogitBias = None,
    max_new_tokens: words.MaxNewTokens = None,
    min_new_tokens: words.MinNewTokens = None,
    stop: words.Stop = None,
    ignore_eos: Annotated[bool, typer.Option(help="Go on past the model's end ids.")] = False,
    logprobs: words.Logprobs = None,
    prompt_logprobs: words.PromptLogprobs = None,
    json_schema: words.JsonSchema = None,
    json_object: words.JsonObject = False,
    regex: words.Regex = None,
    grammar: words.Grammar = None,
    choice: words.ChoiceTexts = None,
    n: words.NumAnswers = None,
    cache_salt: words.CacheSalt = None,
    request_id: Annotated[str | None, typer.Option(help="Your name for the request.")] = None,
    timeout: Annotated[float | None, typer.Option(help="Deadline in seconds.")] = None,
    verbose: words.Verbose = False,
    as_json: JsonFlag = False,
) -> None:
    """Generate an answer; streams it as text, or prints one JSON object per answer with --json."""
    output = Output(as_json)
    options = words.given(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        repetition_penalty=repetition_penalty,
        logit_bias=words.logit_bias(logit_bias),
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
        stop=stop,
        ignore_eos=ignore_eos or None,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        json_schema=words.text_or_file("--json-schema", json_schema),
        json_object=json_object or None,
        regex=regex,
        grammar=words.text_or_file("--grammar", grammar),
        choice=choice,
        n=n,
        cache_salt=cache_salt,
        parse_output=parse_output or None,
        request_id=request_id,
    )
    source = _prompt(prompt, chat, system, tools, template_kwargs)
    answers = answers_for(n)
    with (
        connection.client() as client,
        client.generate(source, timeout=timeout, **options) as stream,
        closed_by_signals(stream) as interrupt,
    ):
        follow(stream, output, answers)
    interrupt.check()
    show(answers, output)
    if verbose:
        output.note(f"request {answers[0].request_id}")


@connects
def chat(
    connection: Connection,
    system: SystemOption = None,
    temperature: words.Temperature = None,
    top_p: words.TopP = None,
    top_k: words.TopK = None,
    min_p: words.MinP = None,
    seed: words.Seed = None,
    frequency_penalty: words.FrequencyPenalty = None,
    presence_penalty: words.PresencePenalty = None,
    repetition_penalty: words.RepetitionPenalty = None,
    max_new_tokens: words.MaxNewTokens = None,
    verbose: words.Verbose = False,
    as_json: JsonFlag = False,
) -> None:
    """Talk with the model. /reset forgets the conversation, /exit ends; Ctrl-C stops an answer."""
    output = Output(as_json)
    options = words.given(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        repetition_penalty=repetition_penalty,
        max_new_tokens=max_new_tokens,
    )
    with connection.client() as client:
        model = client.model_info(timeout=10)
        if not model.has_chat_template:
            raise CliError(f"{model.name} has no chat template; use `slotwise generate`")
        if model.output_format:
            options["parse_output"] = True
        talk = _Talk(system, options, verbose)
        output.note(
            f"{model.name} on {client.target}; /reset forgets, /exit ends, Ctrl-C stops an answer"
        )
        history: list[Message] = []
        for question in _questions(output):
            if question == "/reset":
                history = []
                output.note("forgotten")
                continue
            history.append(Message("user", question))
            _converse(client, history, talk, output)


def _prompt(
    prompt: str | None,
    chat: str | None,
    system: str | None,
    tools: str | None,
    template_kwargs: str | None,
) -> Prompt:
    if chat is not None:
        if prompt is not None:
            raise CliError("give a raw prompt or --chat, not both", exit_code=2)
        variables = words.template_kwargs(template_kwargs)
        functions = words.tools_from(tools)
        return Chat.of(chat, system=system, tools=functions, template_kwargs=variables)
    of_chat = {"--system": system, "--tools": tools, "--template-kwargs": template_kwargs}
    for flag, value in of_chat.items():
        if value is not None:
            raise CliError(f"{flag} belongs to --chat; a raw prompt has none", exit_code=2)
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
            client.chat(history, system=talk.system, **talk.options) as stream,
            closed_by_signals(stream) as interrupt,
        ):
            follow(stream, output, [answer])
    except SlotwiseError as error:
        output.error(error.message)
        history.pop()
        return
    with suppress(KeyboardInterrupt):
        interrupt.check()
    if answer.finish_reason is None:
        answer.finish_reason = FinishReason.CANCELLED
    history.append(_turn(answer))
    show([answer], output)
    if talk.verbose:
        output.note(f"request {answer.request_id}")


def _turn(answer: Answer) -> Message:
    """As the template reads it back; what there was none of is absent."""
    reasoning = answer.reasoning_text or None
    return Message("assistant", answer.text, answer.tool_calls, reasoning_content=reasoning)
