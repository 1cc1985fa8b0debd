"""Masks of constraints: what they let through is what was asked for, and all work is bounded."""

from __future__ import annotations

import gc
import json
import random
import re
import time
import weakref
from array import array
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizer_files import sentencepiece, write_byte_level, write_json, write_sentencepiece

from scheduler_service import grammar, grammar_trial
from scheduler_service.detokenizer import decode
from scheduler_service.errors import ConstraintError, InvalidArgumentError
from scheduler_service.generate_call import ConstraintSpec
from scheduler_service.grammar import GrammarCompiler
from scheduler_service.json_file import ModelFilesError
from scheduler_service.tokenizer import Tokenizer

VOCAB_SIZE = 517  # not a multiple of 8, and more than the tokenizers have
ENDS = frozenset((0, 2))
SEEDS = st.integers(0, 2**32)
# The compiler of a module outlives an example, which is what is meant.
MANY = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module", autouse=True)
def patience():
    """Bounds are of a processor's time; how long that takes is the machine's affair."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammar_trial, "_ANSWER_SECONDS", 300.0)
        yield


class Model:
    def __init__(self, path):
        self.tokenizer = Tokenizer(path)
        self.compiler = GrammarCompiler(path, VOCAB_SIZE)

    def compile(self, kind, source="", choices=(), ends=ENDS, min_new=0, at_text_start=False):
        spec = ConstraintSpec(kind, source, tuple(choices))
        return self.compiler.compile(spec, at_text_start=at_text_start).constraint(ends, min_new)

    def ids(self, text):
        """Each byte of a text as a token."""
        tokens = self.tokenizer.tokens
        single = {tokens.get(i): i for i in reversed(range(3, VOCAB_SIZE))}
        return [single[bytes([byte])] for byte in text.encode()]

    def accepts(self, constraint, text):
        """Whether the whole text may be an output, byte by byte."""
        mask = constraint.advance(())
        for token_id in self.ids(text):
            if token_id not in allowed(mask):
                return False
            mask = constraint.advance([token_id])
        return mask.is_complete

    def walk(self, constraint, seed, at_text_start=False, num_tokens=400):
        """Text of a random walk, which prefers to end; None when it did not by then."""
        draw = random.Random(seed)
        mask, ids = constraint.advance(()), []
        for _ in range(num_tokens):
            if mask.allowed is None or (mask.is_complete and draw.random() < 0.2):
                assert mask.is_complete
                detokenizer = self.tokenizer.detokenizer(at_text_start=at_text_start)
                return "".join(map(detokenizer.push, ids)) + detokenizer.finish()
            follows = sorted(allowed(mask) - ENDS)
            if not follows:
                mask = mask.__class__(None, mask.is_complete)
                continue
            ids.append(draw.choice(follows))
            mask = constraint.advance(ids[-1:])
        return None


def allowed(mask):
    data = mask.allowed or b""
    return {i for i in range(8 * len(data)) if data[i // 8] >> i % 8 & 1}


@pytest.fixture(scope="module", params=[write_byte_level, write_sentencepiece])
def model(request, tmp_path_factory):
    return Model(request.param(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    return Model(write_byte_level(tmp_path_factory.mktemp("model")))


PATTERNS = [
    "", "(ab|cd)*e", "[a-f]{3,7}", "h(ell|i)o? ?w*", "[é龤😀]{2,4}x?", r"(?s:.){0,6}", r"[^a]*a",
    r'"(\\["\\n]|[^"\\]){0,9}"', "(a?){20}", r"[一-鿿]+|[0-9]+",
]  # fmt: skip


@MANY
@given(seed=SEEDS, pattern=st.sampled_from(PATTERNS))
def test_a_regex_is_matched_as_a_whole_by_every_walk(model, pattern, seed):
    text = model.walk(model.compile("regex", pattern), seed)
    assert text is None or re.fullmatch(pattern, text), (pattern, text)


SCHEMAS = [
    {"type": "object", "properties": {"é": {"type": "integer"}, "b": {"enum": ["x", 5, None]}},
     "required": ["é", "b"], "additionalProperties": False},
    {"type": "array", "items": {"type": "string", "minLength": 1, "maxLength": 3}, "minItems": 1,
     "maxItems": 3},
    {"anyOf": [{"type": "boolean"}, {"type": "integer", "minimum": -5, "maximum": 120}]},
    {"$ref": "#/$defs/t", "$defs": {"t": {"type": "object", "additionalProperties": False,
     "required": ["n"], "properties": {"n": {"type": "null"}, "t": {"$ref": "#/$defs/t"}}}}},
    {"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 9},
    {"type": "string", "pattern": "^[a-c]+é$"},
]  # fmt: skip


def is_valid(schema, value, root=None):
    """A reference for what SCHEMAS use."""
    root = root or schema
    if "$ref" in schema:
        return is_valid(root["$defs"][schema["$ref"].rpartition("/")[2]], value, root)
    if "anyOf" in schema:
        return any(is_valid(each, value, root) for each in schema["anyOf"])
    if "enum" in schema:
        return any(each == value and type(each) is type(value) for each in schema["enum"])
    match schema["type"]:
        case "object":
            properties = schema["properties"]
            return (
                isinstance(value, dict)
                and value.keys() <= properties.keys()
                and set(schema["required"]) <= value.keys()
                and all(is_valid(properties[key], value[key], root) for key in value)
            )
        case "array":
            return (
                isinstance(value, list)
                and schema["minItems"] <= len(value) <= schema["maxItems"]
                and all(is_valid(schema["items"], each, root) for each in value)
            )
        case "string":
            shortest, longest = schema.get("minLength", 0), schema.get("maxLength", 1e9)
            found = re.search(schema.get("pattern", ""), value)
            return isinstance(value, str) and shortest <= len(value) <= longest and bool(found)
        case "null":
            return value is None
        case "boolean":
            return isinstance(value, bool)
        case "integer":
            fits = isinstance(value, int) and not isinstance(value, bool)
            return fits and schema.get("minimum", value) <= value <= schema.get("maximum", value)
        case "number":
            fits = isinstance(value, int | float) and value % schema["multipleOf"] == 0
            return fits and schema["minimum"] <= value <= schema["maximum"]
    raise AssertionError(schema)


@MANY
@given(seed=SEEDS, schema=st.sampled_from(SCHEMAS))
def test_every_walk_along_a_schema_is_json_that_it_allows(model, schema, seed):
    text = model.walk(model.compile("json_schema", json.dumps(schema)), seed)
    assert text is None or is_valid(schema, json.loads(text)), (schema, text)


@MANY
@given(seed=SEEDS)
def test_every_walk_of_json_object_is_an_object(model, seed):
    text = model.walk(model.compile("json_object"), seed)
    assert text is None or isinstance(json.loads(text), dict), text


def test_a_schema_takes_what_it_allows_and_nothing_else(byte_level):
    source = json.dumps(SCHEMAS[0])
    for text in ('{"é":5,"b":"x"}', '{ "é" : -12 ,\n "b" : null }'):
        assert byte_level.accepts(byte_level.compile("json_schema", source), text)
    for text in ('{"é":"5","b":"x"}', '{"é":5}', '{"é":5,"b":"x","c":1}', '{"é":5.5,"b":5}', "[]"):
        assert not byte_level.accepts(byte_level.compile("json_schema", source), text)


def test_a_name_cannot_be_written_again_by_an_escape(byte_level):
    source = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}})
    assert byte_level.accepts(byte_level.compile("json_schema", source), '{"a":1,"b":"x"}')
    twice = '{"a":1,"\\u0061":"x"}'
    assert not byte_level.accepts(byte_level.compile("json_schema", source), twice)


@MANY
@given(data=st.data(), choices=st.lists(st.text(st.characters(codec="utf-8"), min_size=1),
                                        min_size=1, max_size=5))  # fmt: skip
def test_choices_are_literal(byte_level, choices, data):
    constraint = byte_level.compile("choice", choices=choices)
    assert byte_level.walk(constraint, data.draw(SEEDS)) in {*choices, None}
    for text in choices:
        assert byte_level.accepts(byte_level.compile("choice", choices=choices), text)


@pytest.mark.parametrize(
    ("source", "good", "bad"),
    [
        ('start: a+ B\na: "x" | "(" a ")"\nB: /[0-9]{2}/\n', ["x12", "((x))x07"], ["(x12", "x1"]),
        ('start: "a"~3 /b/i', ["aaab", "aaaB"], ["aab"]),
        ('start: "<[5]> %json &~" // <x> %json\n', ["<[5]> %json &~"], ["a"]),
        ('root ::= x ("," x)*\nx ::= [a-c]+ | "\\u00e9\\x41"', ["a,éA", "cc"], ["a,", "A"]),
        ('root ::= "\\"" [^"\\n]* "\\"" # "x\nstart-er ::= "y"', ['"é"'], ['"', "y"]),
        ('root ::= "\\U0001F600" "\\\\u"', ["😀\\u"], ["😀u"]),
    ],
)
def test_grammars_of_both_forms(byte_level, source, good, bad):
    for text in good:
        assert byte_level.accepts(byte_level.compile("grammar", source), text), text
    for text in bad:
        assert not byte_level.accepts(byte_level.compile("grammar", source), text), text


def test_ends_are_allowed_exactly_where_the_output_is_complete(byte_level):
    constraint = byte_level.compile("regex", "ab?")
    a, b = byte_level.ids("ab")
    first = constraint.advance(())
    assert not first.is_complete
    assert not allowed(first) & ENDS
    assert len(first.allowed) == (VOCAB_SIZE + 7) // 8
    then = constraint.advance([a])
    assert then.is_complete
    assert allowed(then) == {b, *ENDS}
    last = constraint.advance([b])
    assert last.is_complete
    assert allowed(last) == ENDS


def test_without_end_ids_a_complete_output_has_no_mask(byte_level):
    constraint = byte_level.compile("choice", choices=["a"], ends=frozenset())
    assert constraint.advance(()).allowed is not None
    mask = constraint.advance(byte_level.ids("a"))
    assert (mask.allowed, mask.is_complete) == (None, True)


def test_an_end_id_that_is_text_ends_and_is_no_text(byte_level):
    (a,) = byte_level.ids("a")
    constraint = byte_level.compile("regex", "b*a*", ends=frozenset([a]))
    mask = constraint.advance(())
    assert a in allowed(mask)
    begin = byte_level.compile("regex", "a?b", ends=frozenset([a])).advance(())
    assert not begin.is_complete
    assert allowed(begin) == set(byte_level.ids("b"))


def test_min_new_tokens_holds_ends_back(byte_level):
    constraint = byte_level.compile("regex", "a*", min_new=2)
    (a,) = byte_level.ids("a")
    masks = [constraint.advance(()), constraint.advance([a]), constraint.advance([a])]
    assert [bool(allowed(mask) & ENDS) for mask in masks] == [False, False, True]
    assert all(mask.is_complete for mask in masks)
    short = byte_level.compile("choice", choices=["a"], min_new=5)
    short.advance(())
    assert short.advance([a]).allowed is None


def test_markup_and_ids_without_text_are_never_allowed(model):
    markup = {model.tokenizer.token_id(text) for text in model.tokenizer.control_texts}
    assert markup
    mask = model.compile("regex", r"(?s:.)*", ends=frozenset()).advance(())
    assert not allowed(mask) & markup
    assert all(model.tokenizer.tokens.get(i) for i in allowed(mask))
    assert max(allowed(mask)) < VOCAB_SIZE


def test_tokens_spell_the_text_of_markup(byte_level):
    assert byte_level.accepts(byte_level.compile("choice", choices=["<|im_end|>"]), "<|im_end|>")


def test_the_blank_taken_off_a_texts_start_is_no_part_of_it(tmp_path):
    model = Model(write_sentencepiece(tmp_path))
    options = [" hello", "hello", "w"]
    texts = {model.walk(model.compile("choice", choices=options, at_text_start=True), seed, True)
             for seed in range(60)}  # fmt: skip
    assert texts == set(options)
    two_blanks = model.compile("choice", choices=[" w"], at_text_start=True)
    assert model.tokenizer.token_id("\u2581w") not in allowed(two_blanks.advance(()))
    no_blank = model.compile("choice", choices=["hello"])
    assert not {model.ids(" ")[0]} & allowed(no_blank.advance(()))
    one_blank = model.compile("choice", choices=["hello"], at_text_start=True)
    assert {*model.ids(" "), *model.ids("h")} <= allowed(one_blank.advance(()))


def test_a_token_that_was_not_allowed_is_a_bug(byte_level):
    a, b = byte_level.ids("ab")
    for token_id in (b, 2, VOCAB_SIZE - 1, VOCAB_SIZE, 5 * VOCAB_SIZE):
        with pytest.raises(ValueError, match=f"token {token_id} "):
            byte_level.compile("regex", "aa").advance([token_id])
    assert byte_level.compile("regex", "aa").advance([a, a]).is_complete


def test_an_output_that_cannot_go_on_says_so(byte_level):
    constraint = byte_level.compile("grammar", 'start: "a" x | "b"\nx: x "c"')
    mask = constraint.advance(())
    assert mask.allowed is not None
    (a,) = byte_level.ids("a")
    if a in allowed(mask):
        dead = constraint.advance([a])
        assert (dead.allowed, dead.is_complete) == (None, False)


@pytest.mark.parametrize(
    ("kind", "source", "words"),
    [
        ("regex", "(a", "unclosed group"),
        ("regex", "(?=a)b", "look-around"),
        ("regex", r"[^\s\S]", "no text satisfies it"),
        ("regex", "a" * 4097, "at most 4096"),
        ("regex", "\ud800", "surrogate"),
        ("grammar", "start: x", "x"),
        ("grammar", "", "no start rule"),
        ("grammar", 'root ::= "a', "is no GBNF"),
        ("grammar", "root ::= " + "(" * 9999, "nested too deeply"),
        ("grammar", "start: " + "(" * 9999, "nested"),
        ("grammar", 'root ::= "\\uD800"', "no character"),
        ("grammar", "".join(f"a{i} ::= a{i + 1}\n" for i in range(501)), "at most 500"),
        ("grammar", 'start: "a" <[5]>', "by name or id"),
        ("grammar", 'start: <|im_end|> "a"', "by name or id"),
        ("grammar", 'start: b\nb[temperature=0.5]: "a"', "attributes"),
        ("grammar", 'start: %json {"x-guidance": {"lenient": true}, "foo": 1}', "%json"),
        ("grammar", '%llguidance {"allow_invalid_utf8": true}\nstart: "a"', "%llguidance"),
        ("grammar", "start: A\nA: ~/a/", "complements"),
        ("grammar", "start: x\nx: x", "no text satisfies it"),
        ("grammar", 'start: "' + "a" * 32_768 + '"', "at most 32768"),
        ("json_schema", "", "no JSON"),
        ("json_schema", "{", "no JSON"),
        ("json_schema", "NaN", "no JSON"),
        ("json_schema", '{"const": NaN}', "no JSON"),
        ("json_schema", f'{{"enum": [{"9" * 4301}]}}', "4301 digits of a number are too many"),
        ("json_schema", '{"const": "\\ud800"}', "surrogate"),
        ("json_schema", '{"properties": {"\\udc00": {}}}', "surrogate"),
        ("json_schema", "5", "not an object"),
        ("json_schema", "[]", "not an object"),
        ("json_schema", "null", "not an object"),
        ("json_schema", "false", "false"),
        ("json_schema", "[" * 500_000, "nested too deeply"),
        ("json_schema", '{"foo": 1}', "/foo is not supported"),
        ("json_schema", '{"properties": {"a": {"foo": 1}}}', "/properties/a/foo is not supported"),
        ("json_schema", '{"type": "string", "nullable": true}', "nullable"),
        ("json_schema", '{"x-guidance": {"lenient": true}}', "x-guidance"),
        ("json_schema", '{"contentEncoding": "base64"}', "/contentEncoding is not supported"),
        ("json_schema", '{"contentMediaType": "text/html"}', "/contentMediaType is not"),
        ("json_schema", '{"contentSchema": {}}', "/contentSchema is not supported"),
        ("json_schema", '{"type": "string", "type": "integer"}', 'the key "type" twice'),
        ("json_schema", '{"items": {"properties": {"a": {}, "a": true}}}', 'the key "a" twice'),
        ("json_schema", '{"type": 5}', "type"),
        ("json_schema", '{"type": "foo"}', "foo"),
        ("json_schema", '{"minLength": "a"}', "minLength"),
        ("json_schema", '{"minimum": "a"}', "minimum"),
        ("json_schema", '{"required": "a"}', "required"),
        ("json_schema", '{"enum": {}}', "enum"),
        ("json_schema", '{"enum": []}', "anyOf is empty"),
        ("json_schema", '{"items": 5}', "items"),
        ("json_schema", '{"properties": []}', "properties"),
        ("json_schema", '{"properties": {"a": 5}}', "/properties/a"),
        ("json_schema", '{"anyOf": {}}', "anyOf"),
        ("json_schema", '{"$defs": 5}', "defs"),
        ("json_schema", '{"pattern": "("}', "unclosed group"),
        ("json_schema", '{"format": "zzz"}', "zzz"),
        ("json_schema", '{"uniqueItems": true}', "uniqueItems"),
        ("json_schema", '{"not": {}}', "not"),
        ("json_schema", '{"$ref": "http://a/b"}', "http://a/b"),
        ("json_schema", '{"$ref": "#/$defs/a"}', "a"),
        ("json_schema", '{"$ref": "#"}', "no text satisfies it"),
        ("json_schema", '{"multipleOf": 99999989}', "at most 10000"),
        ("json_schema", '{"multipleOf": 0}', "not above 0"),
        ("json_schema", '{"multipleOf": true}', "multipleOf"),
        ("json_schema", '{"maximum": ' + "9" * 5000 + "}", "digits"),
        ("json_schema", '{"allOf": [{"multipleOf": 101}, {"multipleOf": 0.0103}]}',
         "10403 remainders of multipleOf, joined"),
        ("json_schema", '{"items": {"multipleOf": 9973}, "multipleOf": 28}', "10001 remainders of"),
        ("json_schema", '{"allOf": [{"multipleOf": 4}, {"multipleOf": true}]}', "multipleOf"),
        ("grammar", 'start: A\nA: "x"\n' + '_B : /y/\n' * 500, "501 terminals are too many"),
        # Both are the least integer to the library, whose stack overflows: the process would end.
        ("json_schema", '{"minimum": -1e30, "maximum": -1e29}', "/minimum is -1e+30; -90071992547"),
        ("json_schema", '{"allOf": [{"exclusiveMaximum": -1e19}]}', "/allOf/0/exclusiveMaximum is"),
        ("json_schema", '{"type": "integer", "minimum": 9007199254740993}', "/minimum is 9007199"),
        ("choice", "", "nothing"),
        ("choose", "", "nothing"),
    ],
)  # fmt: skip
def test_what_cannot_be_followed_is_refused_by_name(byte_level, kind, source, words):
    with pytest.raises(InvalidArgumentError) as caught:
        byte_level.compile(kind, source)
    assert caught.value.field == kind
    assert words in caught.value.description
    assert len(caught.value.description) < 450


def chain(num, schema):
    links = {f"a{i}": schema({"$ref": f"#/$defs/a{i + 1}"}) for i in range(num)}
    return json.dumps({"$ref": "#/$defs/a0", "$defs": {**links, f"a{num}": {"type": "integer"}}})


def rules(num, last, line):
    return "".join(line.format(i, i + 1) for i in range(1, num)) + f"{line[0]}{num}: {last}\n"


JOINED = [f".*a.{{{i}}}b.*" for i in range(60)]
HOSTILE = {
    "regex in regex": ("regex", "(a{1,1000}){1,1000}"),
    "stars": ("regex", "((a*)*)*b"),
    "distances": ("regex", "(.*a.{100}){50}"),
    "options": ("regex", "a?" * 2048),
    "doubling": ("grammar", "start: A1\n" + rules(40, '"c"', "A{0}: A{1} A{1}\n")),
    "optional rules": ("grammar", "start: " + "a? " * 8000 + '\na: "b"'),
    "a chain of rules": ("grammar", "start: a1\n" + rules(2000, '"c"', 'a{0}:a{1} "b"\n')),
    "a chain of terminals": ("grammar", "start: A1\n" + rules(1600, '"c"', 'A{0}:A{1} "b"?\n')),
    "remainders": ("json_schema", '{"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}'),
    "intersections": ("grammar", "start: A\nA: " + " & ".join(f"/{each}/" for each in JOINED)),
    "ambiguous": ("grammar", 'start: s\ns: s s | s s s | "a"'),
    "a chain of objects": ("json_schema", chain(3300, lambda r: {"properties": {"a": r}})),
    "a chain of arrays": ("json_schema", chain(3300, lambda r: {"type": "array", "items": r})),
    "a chain of choices": ("json_schema", chain(3300, lambda r: {"anyOf": [r, {"const": 1}]})),
    "joined patterns": ("json_schema", json.dumps({"allOf": [{"pattern": p} for p in JOINED]})),
    "100,000 values": ("json_schema", json.dumps({"enum": list(range(100_000))})),
    "many names": ("json_schema", json.dumps({"properties": {f"p{i}": {} for i in range(40_000)}})),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_constraints_are_bounded(byte_level, name):
    begin = time.process_time()
    message = "too complex"
    try:
        byte_level.walk(byte_level.compile(*HOSTILE[name]), 1, num_tokens=100)
    except (InvalidArgumentError, ConstraintError) as error:
        message = str(error)
    assert len(message) < 450
    # Generous, and of a processor's time, as the bound is: the machine may be busy otherwise.
    assert time.process_time() - begin < 20


def test_a_mask_that_runs_over_its_bound_names_the_constraint(byte_level):
    source = 'start: "cc" x\nx: ' + "a? " * 1000 + '\na: "b"'
    constraint = byte_level.compile("grammar", source)
    with pytest.raises(ConstraintError, match="grammar: too complex to be followed after") as error:
        constraint.advance(byte_level.ids("ccbbbb"))
    assert "consider" not in str(error.value)


def test_a_refusal_keeps_nothing_of_its_request(byte_level):
    """2,000 refusals are remembered; a request may have 60 MB."""

    def refuse(prompt):
        with pytest.raises(InvalidArgumentError):
            byte_level.compile("regex", "(of-this-test")

    prompt = array("I", range(10))
    kept = weakref.ref(prompt)
    refuse(prompt)
    del prompt
    gc.collect()
    assert kept() is None


def test_what_cannot_be_followed_at_all_is_refused_at_once(byte_level):
    source = "start: " + "a? " * 1000 + '\na: "b"'
    with pytest.raises(
        InvalidArgumentError, match=r"grammar: too complex to be followed: 3001 .* at most 1000"
    ):
        byte_level.compile("grammar", source)
    # But not where one of two first tokens can be followed.
    source = 'start: "a" x | "z"\nx: ' + "b? " * 900 + '\nb: "b"'
    with pytest.raises(ConstraintError, match="too complex to be followed after"):
        byte_level.compile("grammar", source).advance(byte_level.ids("a"))


def test_the_errors_are_for_people(byte_level):
    """Not the words for who uses the library, nor places in our text."""
    for kind, source in (
        ("regex", ".*" * 500 + "z"),
        ("grammar", "start: " + "A? " * 8000 + '\nA: "a"'),
        ("json_schema", '{"const":' + "[" * 200 + "]" * 200 + "}"),
    ):
        with pytest.raises(InvalidArgumentError) as error:
            byte_level.compile(kind, source)
        for word in ("increase", "limits.", "try avoiding", "column", "sys."):
            assert word not in str(error.value)


def walk_until_it_breaks(model, kind, source):
    """The library's copies share the states of their lexer, and its bound."""
    for seed in range(1000):
        model.walk(model.compile(kind, source), seed)


def test_what_one_output_broke_is_whole_for_the_next(byte_level):
    with pytest.raises(ConstraintError, match="too many states"):
        walk_until_it_breaks(byte_level, *HOSTILE["distances"])
    assert byte_level.compile(*HOSTILE["distances"]).advance(()).allowed is not None


def test_what_one_output_broke_is_no_fault_of_ours_in_another(byte_level):
    source = json.dumps({"multipleOf": 9973, "type": "integer", "minimum": -(1 << 53)})
    other = byte_level.compile("json_schema", source)
    token_id = max(allowed(other.advance(())))
    with pytest.raises(ConstraintError, match="too complex"):
        walk_until_it_breaks(byte_level, "json_schema", source)
    with pytest.raises(ConstraintError, match="too complex to be followed after 0 tokens"):
        other.advance([token_id])


def test_equal_constraints_share_their_compilation_and_nothing_else(byte_level):
    one, other = byte_level.compile("regex", "abc"), byte_level.compile("regex", "abc")
    a, b, _ = byte_level.ids("abc")
    before = other.advance(())
    one.advance([a, b])
    assert other.advance(()) == before
    assert other.advance([a]) != one.advance(())


def test_the_cache_forgets(tmp_path):
    model = Model(write_byte_level(tmp_path))
    for i in range(12):
        model.compile("choice", choices=[f"{i}" + "x" * 400_000])
    kept = model.compiler._compiled
    assert 0 < len(kept) < 12
    assert 400_000 * len(kept) <= grammar.CACHE_BYTES
    for i in range(grammar.MAX_KEPT + 5):
        model.compile("regex", f"{i}")
    assert len(kept) == grammar.MAX_KEPT


def test_many_threads_at_once(byte_level):
    def one(seed):
        pattern = f"[a-c]{{{seed % 5 + 1}}}"
        return re.fullmatch(pattern, byte_level.walk(byte_level.compile("regex", pattern), seed))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(one, range(200)))


def test_a_decoder_that_takes_off_more_is_refused_by_name(tmp_path):
    values = sentencepiece()
    values["decoder"]["decoders"][-1]["start"] = 2
    write_json(tmp_path / "tokenizer.json", values)
    with pytest.raises(ModelFilesError, match="takes 2 characters off"):
        GrammarCompiler(tmp_path / "tokenizer.json", VOCAB_SIZE)


def test_decode_of_ids_is_the_text_that_was_followed(byte_level):
    text = '{"é":5,"b":"龤"}'
    assert decode(byte_level.tokenizer.tokens, byte_level.ids(text)) == text
