"""Options of a request on the command line, and how their words are read."""

import json
from pathlib import Path
from typing import Annotated, Any, Final, cast

import typer

from slotwise_client import GenerateOptions, Tool

from .output import CliError

Temperature = Annotated[float | None, typer.Option(help="0 is greedy.")]
TopP = Annotated[float | None, typer.Option(help="Keep the most likely tokens up to this sum.")]
TopK = Annotated[int | None, typer.Option(help="Keep this many most likely tokens.")]
MinP = Annotated[float | None, typer.Option(help="Keep tokens at least this likely, relatively.")]
Seed = Annotated[int | None, typer.Option(help="Key of the draw; the same seed, the same answer.")]
FrequencyPenalty = Annotated[
    float | None, typer.Option(help="Taken off a token's logit each time it was generated.")
]
PresencePenalty = Annotated[
    float | None, typer.Option(help="Taken off the logit of tokens that were generated.")
]
RepetitionPenalty = Annotated[
    float | None, typer.Option(help="Above 1, tokens of prompt and answer become less likely.")
]
LogitBias = Annotated[
    list[str] | None,
    typer.Option(metavar="ID=BIAS", help="Added to a token's logit; may be repeated."),
]
MaxNewTokens = Annotated[int | None, typer.Option(help="Most tokens to generate.")]
MinNewTokens = Annotated[int | None, typer.Option(help="No end and no stop before so many tokens.")]
Stop = Annotated[list[str] | None, typer.Option(help="Stop at this text; may be repeated.")]
Logprobs = Annotated[
    int | None, typer.Option(help="Show each token's logprob beside so many likeliest ones.")
]
PromptLogprobs = Annotated[int | None, typer.Option(help="The same for the tokens of the prompt.")]
JsonSchema = Annotated[
    str | None, typer.Option(metavar="TEXT|@FILE", help="Answer with JSON of this schema.")
]
JsonObject = Annotated[bool, typer.Option("--json-object", help="Answer with a JSON object.")]
Regex = Annotated[str | None, typer.Option(help="Answer with a text that this matches whole.")]
Grammar = Annotated[
    str | None, typer.Option(metavar="TEXT|@FILE", help="Answer by this Lark or GBNF grammar.")
]
ChoiceTexts = Annotated[
    list[str] | None, typer.Option("--choice", help="Answer with one of these; repeat it.")
]
NumAnswers = Annotated[int | None, typer.Option("-n", "--n", help="So many answers [1].")]
CacheSalt = Annotated[str | None, typer.Option(help="Share cached prefixes by this word only.")]
ParseOutput = Annotated[
    bool, typer.Option("--parse-output", help="Tell reasoning and tool calls from the text.")
]
Tools = Annotated[
    str | None,
    typer.Option(metavar="TEXT|@FILE", help="JSON list of functions that the model may call."),
]
TemplateKwargs = Annotated[
    str | None,
    typer.Option(metavar="JSON", help='Variables of the template: {"enable_thinking": false}.'),
]

RequestId = Annotated[str, typer.Argument(help="The request's name, as Accepted told it.")]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Tell the request's id at the end, on stderr.")
]

_TOOL_KEYS: Final = {"name", "description", "parameters"}


def given(**options: Any) -> GenerateOptions:
    """The options that were set on the command line."""
    chosen = {name: value for name, value in options.items() if value is not None}
    return cast(GenerateOptions, chosen)


def logit_bias(words: list[str] | None) -> dict[int, float] | None:
    """From ID=BIAS; CliError (exit 2) for other words and for an id that stands twice."""
    if not words:
        return None
    biases: dict[int, float] = {}
    for word in words:
        token_id, _, bias = word.partition("=")
        try:
            key, value = int(token_id), float(bias)
        except ValueError as error:
            message = f"--logit-bias {word!r} is not ID=BIAS, like 42=-100"
            raise CliError(message, exit_code=2) from error
        if key in biases:
            raise CliError(f"--logit-bias names the id {key} twice", exit_code=2)
        biases[key] = value
    return biases


def text_or_file(flag: str, word: str | None) -> str | None:
    """The word itself, or with @PATH what that file holds; CliError (exit 2) if that is no text."""
    if word is None or not word.startswith("@"):
        return word
    try:
        return Path(word[1:]).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise CliError(f"{flag} {word}: {error}", exit_code=2) from error


def template_kwargs(word: str | None) -> dict[str, object] | None:
    """A JSON object; CliError (exit 2) otherwise."""
    if word is None:
        return None
    value = _json("--template-kwargs", word)
    if not isinstance(value, dict):
        raise CliError(f"--template-kwargs {word!r} is not a JSON object", exit_code=2)
    return value


def tools_from(word: str | None) -> list[Tool]:
    """Functions as {"name", "description", "parameters"}, bare or as OpenAI wraps them.

    CliError (exit 2) for anything else, a key that is not known included.
    """
    if word is None:
        return []
    text = text_or_file("--tools", word)
    assert text is not None
    value = _json("--tools", text)
    if not isinstance(value, list):
        raise CliError("--tools is not a JSON list of functions", exit_code=2)
    return [_tool(index, item) for index, item in enumerate(value)]


def _tool(index: int, item: Any) -> Tool:
    if isinstance(item, dict) and item.keys() == {"type", "function"}:
        item = item["function"]
    if not isinstance(item, dict) or "name" not in item or not item.keys() <= _TOOL_KEYS:
        known = ", ".join(sorted(_TOOL_KEYS))
        raise CliError(f"--tools[{index}] is not an object of {known}", exit_code=2)
    if not isinstance(item.get("parameters", {}), dict):
        raise CliError(f"--tools[{index}].parameters is not a JSON object", exit_code=2)
    return Tool(**item)


def _json(flag: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise CliError(f"{flag} is not JSON: {error}", exit_code=2) from error
