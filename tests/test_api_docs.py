"""docs/api.md: its reference is what the proto says, and its examples run."""

from __future__ import annotations

import json
import re

import pytest
from api_reference import PAGE, Reference, parts_of, read_proto

from checkpoints import make_checkpoint
from slotwise.v1 import inference_pb2 as pb
from slotwise_cli.demo_model import ensure_demo_model
from slotwise_cli.output import report_nothing
from slotwise_cli.server_process import running_server
from slotwise_client import SlotwiseError, errors

BEFORE, REFERENCE, _ = parts_of(PAGE.read_text())
ADDRESS = '"127.0.0.1:50051"'
# In the style of Qwen3: ChatML, functions as JSON, calls and reasoning in their markup.
TEMPLATE = """
{%- if tools %}{{ '<|im_start|>system\\n' }}
{%- for tool in tools %}{{ (tool | tojson) + '\\n' }}{% endfor %}
{{- 'Call with <tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{ message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}{% endif %}"""


def examples() -> dict[str, str]:
    """Python by heading; a heading with several has them one after another."""
    found: dict[str, str] = {}
    for section in BEFORE.split("\n### ")[1:]:
        code = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
        found[section.partition("\n")[0]] = "\n".join(code)
    return found


def setup() -> str:
    """What every example goes on from."""
    head = BEFORE.split("\n### ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", head, re.DOTALL)
    assert ADDRESS in code
    return str(code)


@pytest.fixture(scope="module")
def demo_address():
    flags = ["--max-seq-len", "1024", "--num-slots", "4"]
    with running_server(ensure_demo_model(), flags, report_nothing) as address:
        yield address


@pytest.fixture(scope="module")
def qwen_address(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    make_checkpoint(folder, "qwen3", tokenizer=True, max_position_embeddings=2048)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": TEMPLATE}))
    flags = ["--num-slots", "2"]
    with running_server(folder, flags, report_nothing) as address:
        yield address


@pytest.mark.slow
@pytest.mark.parametrize("heading", examples())
def test_the_example_runs(heading, request):
    code = examples()[heading]
    assert code, f"no example of {heading}"
    needs_format = "parse_output" in code
    address = request.getfixturevalue("qwen_address" if needs_format else "demo_address")
    names: dict = {}
    exec(setup().replace(ADDRESS, repr(address)), names)
    with names["client"]:
        exec(compile(code, f"docs/api.md, {heading}", "exec"), names)


def test_there_is_an_example_of_every_feature():
    code = "\n".join(examples().values())
    sampling = {f.name for f in pb.SamplingParams.DESCRIPTOR.fields}
    fields = {f.name for f in pb.GenerateRequest.DESCRIPTOR.fields} | sampling
    # Read as the prompt, by the kind of value, or in a word of the page.
    told = {"text", "token_ids", "chat", "sampling"}
    missing = [name for name in fields - told if not re.search(rf"\b{name}\b", BEFORE)]
    assert missing == []
    calls = ["generate", "complete", "cancel", "tokenize", "detokenize", "render_chat"]
    calls += ["model_info", "server_info", "load", "slots", "flush_cache", "health"]
    assert [name for name in calls if f".{name}(" not in code] == []


def test_the_reference_is_what_the_proto_says():
    wanted = Reference(read_proto()).text()
    assert REFERENCE.strip() == wanted.strip(), "the proto has changed: make docs-api"


def test_the_reference_has_every_call_field_and_value():
    """Not by the maker of the page, which may leave one out."""
    file = pb.DESCRIPTOR
    for method in file.services_by_name["Inference"].methods:
        assert f"**{method.name}** ({method.input_type.name})" in REFERENCE
    sections = dict(re.findall(r"#### (\w+ \w+)\n(.*?)(?=\n###|\Z)", REFERENCE, re.DOTALL))
    for name, message in file.message_types_by_name.items():
        rows = re.findall(r"^\| `(\w+)` \|", sections[f"message {name}"], re.MULTILINE)
        assert rows == [field.name for field in message.fields], name
    for name, enum in file.enum_types_by_name.items():
        rows = re.findall(r"^\| `(\w+)` \|", sections[f"enum {name}"], re.MULTILINE)
        assert rows == [value.name for value in enum.values], name
    kinds = len(file.message_types_by_name) + len(file.enum_types_by_name)
    assert len(sections) == kinds


def test_every_link_of_the_page_has_its_heading():
    page = PAGE.read_text()
    anchors = {
        re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-")
        for heading in re.findall(r"^#+ (.*)$", page, re.MULTILINE)
    }
    assert set(re.findall(r"\]\(#([^)]*)\)", page)) - anchors == set()
    for link in re.findall(r"\]\((?!#|http)([^)]*)\)", page):
        assert (PAGE.parent / link).exists(), link


def test_every_error_of_the_client_is_told():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    names = {kind.__name__ for kind in kinds if issubclass(kind, SlotwiseError)}
    assert {name for name in names if f"`{name}`" not in BEFORE} == set()
