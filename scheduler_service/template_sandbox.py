"""jinja2 in which a template can neither reach out, nor work or grow without end.

jinja2's own sandbox keeps templates from Python's insides. Here every loop, call, filter, test,
operator and piece of output is counted too: steps and time, so that a rendering ends, and the bytes
it makes, so that it fits. One operation alone stays small: what multiplies is charged before it is
done, and no container may be worth more, written out, than the whole budget (lists that hold the
same list twice, again and again, would be).
"""

from __future__ import annotations

import re
import sys
import time
import types
from collections.abc import Callable, ItemsView, Iterable, KeysView, Mapping, ValuesView
from copy import copy
from functools import wraps
from typing import Any, TypeVar, cast

import jinja2
from jinja2 import nodes
from jinja2.filters import do_format, sync_do_join
from jinja2.runtime import Context, markup_join, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context
from jinja2.utils import _PassArg as PassArg
from jinja2.visitor import NodeTransformer

T = TypeVar("T")

MAX_STEPS = 2_000_000
# Items that one filter may walk over.
MAX_ITEMS = 200_000
# Of a whole number; about 10,000 digits.
MAX_BITS = 1 << 15
# The clock is read once in so many steps.
LOOK_STEPS = 500
ITEM_BYTES = 64
CHAR_ITEM_BYTES = 80

# No template of the field uses these, and they take long for what they are given.
UNOFFERED_FILTERS = (
    *("filesizeformat", "pprint", "random", "striptags", "urlencode", "urlize", "wordwrap"),
    "xmlattr",
)
WALKING_FILTERS = frozenset(
    (
        *("batch", "dictsort", "groupby", "items", "join", "list", "map", "max", "min", "reject"),
        *("rejectattr", "reverse", "select", "selectattr", "slice", "sort", "sum", "unique"),
    )
)
# Lists of characters, where the value is a text.
LISTING_FILTERS = frozenset({"groupby", "list", "sort", "max", "min", "batch", "slice"})
CONTAINERS = (list, tuple, dict, KeysView, ValuesView, ItemsView)
# Names of our own filters: no template can write them.
STEP, TAKE, MADE, CHECK, CONCAT = "its step", "its text", "its value", "its part", "its concat"


class TemplateLimitError(Exception):
    """A rendering went beyond what one may use."""


class TemplateTimeoutError(TemplateLimitError):
    """It took too long; with more time it might end."""


class Budget:
    """What one rendering may use: bytes, time in its thread, and steps."""

    def __init__(
        self,
        max_bytes: int,
        max_ns: int,
        *,
        max_steps: int = MAX_STEPS,
        clock: Callable[[], int] = time.thread_time_ns,
    ) -> None:
        self._max_bytes = max_bytes
        self._max_weight = max_bytes // 8
        self._bytes_left = max_bytes
        self._max_steps = max_steps
        self._steps_left = max_steps
        self._max_ns = max_ns
        self._clock = clock
        self._start_ns = clock()
        self._until_look = LOOK_STEPS
        # By id; the value is kept so that its id stays its own.
        self._containers: dict[int, tuple[object, int, int]] = {}

    def work(self, steps: int) -> None:
        """Counts steps of about a microsecond."""
        self._steps_left -= steps
        if self._steps_left < 0:
            raise TemplateLimitError(f"it takes more than {self._max_steps} steps")
        self._pass_time(steps)

    def walk(self, num_items: int) -> None:
        """Before an operation on so many items."""
        if num_items > MAX_ITEMS:
            raise TemplateLimitError(f"it walks over {num_items} items, more than {MAX_ITEMS}")
        self.work(num_items)

    def take(self, num_bytes: int) -> None:
        """Before, or after, so much is made."""
        self._bytes_left -= num_bytes
        if self._bytes_left < 0:
            raise TemplateLimitError(f"it makes more than {self._max_bytes} bytes of values")
        self._pass_time(num_bytes >> 12)

    def made(self, value: T) -> T:
        """Charges a new value, without what it refers to; returns it."""
        if isinstance(value, str | bytes):
            self.take(sys.getsizeof(value))
        elif isinstance(value, list | tuple | dict):
            self.take(ITEM_BYTES * (1 + len(value)))
        return value

    def weigh(self, value: Any) -> int:
        """About the characters of a value written out, each reference followed."""
        if isinstance(value, str | bytes):
            self._pass_time(len(value) >> 12)
            return len(value)
        if isinstance(value, int) and value.bit_length() > MAX_BITS:
            raise TemplateLimitError(f"it makes whole numbers of more than {MAX_BITS} bits")
        return self._weigh_container(value)[0] if isinstance(value, CONTAINERS) else 1

    def depth(self, value: Any) -> int:
        """How deep containers are nested in it."""
        return self._weigh_container(value)[1] if isinstance(value, CONTAINERS) else 0

    def _weigh_container(self, value: Any) -> tuple[int, int]:
        known = self._containers.get(id(value))
        if known is not None:
            return known[1:]
        weight, depth = 1, 0
        for item in _parts(value):
            weight += self.weigh(item) + 1
            depth = max(depth, self.depth(item))
        self._pass_time(len(value))
        if weight > self._max_weight:
            raise TemplateLimitError(f"it makes a value of more than {self._max_weight} characters")
        self._containers[id(value)] = value, weight, depth + 1
        return weight, depth + 1

    def _pass_time(self, steps: int) -> None:
        self._until_look -= 1 + steps
        if self._until_look < 0:
            self._until_look = LOOK_STEPS
            if self._clock() - self._start_ns > self._max_ns:
                raise TemplateTimeoutError(f"it takes longer than {self._max_ns // 10**6} ms")


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return (*value, *value.values())
    return (part for pair in value for part in pair) if isinstance(value, ItemsView) else value


class Sandbox(ImmutableSandboxedEnvironment):
    """Compiles templates; a copy with a budget of its own runs one rendering."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})
    budget: Budget

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_finalize, **options)
        self.globals["namespace"] = _Namespace
        del self.globals["lipsum"]
        for name in UNOFFERED_FILTERS:
            del self.filters[name]
        self.filters |= {"format": _format, "join": _join, "sum": _sum}
        for name, function in tuple(self.filters.items()):
            self.add_filter(name, function)
        for name, function in tuple(self.tests.items()):
            self.tests[name] = _bounded(name, function, is_test=True)
        self.filters |= OWN_FILTERS

    def add_filter(self, name: str, function: Any) -> None:
        self.filters[name] = _bounded(name, function)

    def compile_bounded(self, source: str) -> types.CodeType:
        """jinja2.TemplateError when the source is not a template."""
        code: types.CodeType = self.compile(_Bounds().visit(self.parse(source)))
        return code

    def run(self, code: types.CodeType, budget: Budget, variables: Mapping[str, Any]) -> str:
        """What the template writes. Whatever it raises, or TemplateLimitError."""
        environment = copy(self)
        environment.budget = budget
        globals_ = environment.make_globals(None)
        return jinja2.Template.from_code(environment, code, globals_).render(variables)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = self.budget
        budget.work(1)
        weights = budget.weigh(left), budget.weigh(right)
        match operator:
            case "*":
                _check_product(budget, left, right)
            case "**" if isinstance(left, int) and isinstance(right, int):
                if left.bit_length() * right > MAX_BITS:
                    raise TemplateLimitError(f"it makes a number of more than {MAX_BITS} bits")
            case "%" if isinstance(left, str):
                budget.take(_format_size(left, weights[1]))
        return budget.made(super().call_binop(context, operator, left, right))

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(argument, tuple):
            self.budget.weigh(argument)
        return super().getitem(obj, argument)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        # The odd names leave all others to the callee, as in jinja2.
        budget = __self.budget
        budget.work(1)
        for value in args:
            budget.weigh(value)
        for name, value in kwargs.items():
            if not name.startswith("_"):
                budget.weigh(value)
        if isinstance(__obj, types.BuiltinMethodType):
            args = _check_method(budget, __obj, args, kwargs)
        elif getattr(__obj, "__name__", "") in ("format", "format_map"):
            pattern = __obj.__wrapped__.__self__
            budget.take(_format_size(pattern, sum(map(budget.weigh, (*args, *kwargs.values())))))
        return budget.made(super().call(__context, __obj, *args, **kwargs))


class _Namespace(Namespace):
    """Its attributes change, so that their weight cannot be known: not written out."""

    def __repr__(self) -> str:
        return "<Namespace>"


class _Bounds(NodeTransformer):
    """Puts the counting into a parsed template, where jinja2 offers no hook."""

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        self.generic_visit(node)
        change = CHANGES.get(type(node))
        return node if change is None else change(node)


def _own(name: str, value: nodes.Expr) -> nodes.Expr:
    return nodes.Filter(value, name, [], [], None, None, lineno=value.lineno)


def _statement(name: str, argument: object, lineno: int) -> nodes.Stmt:
    return nodes.ExprStmt(_own(name, nodes.Const(argument, lineno=lineno)), lineno=lineno)


def _count_loop(node: nodes.For) -> nodes.Node:
    if node.test is not None:
        # Items that fail the test never reach the body.
        step = _own(STEP, nodes.Const(True, lineno=node.lineno))
        node.test = nodes.And(step, node.test, lineno=node.lineno)
    node.body.insert(0, _statement(STEP, True, node.lineno))
    return node


def _count_text(node: nodes.Output) -> list[nodes.Node]:
    size = sum(len(n.data) for n in node.nodes if isinstance(n, nodes.TemplateData))
    return [_statement(TAKE, size, node.lineno), node] if size else [node]


def _count_concat(node: nodes.Concat) -> nodes.Node:
    return _own(CONCAT, nodes.List(node.nodes, lineno=node.lineno))


def _count_value(node: nodes.Expr) -> nodes.Node:
    return _own(MADE, node)


def _count_tuple(node: nodes.Tuple) -> nodes.Node:
    return _own(MADE, node) if node.ctx == "load" else node


def _count_slice(node: nodes.Getitem) -> nodes.Node:
    return _own(MADE, node) if isinstance(node.arg, nodes.Slice) else node


def _check_key(node: nodes.Pair) -> nodes.Node:
    node.key = _checked(node.key)
    return node


def _check_sides(node: nodes.Compare) -> nodes.Node:
    sides = [node.expr, *(operand.expr for operand in node.ops)]
    if not any(isinstance(side, nodes.Const) for side in sides):
        node.expr = _checked(node.expr)
        for operand in node.ops:
            operand.expr = _checked(operand.expr)
    return node


def _checked(node: nodes.Expr) -> nodes.Expr:
    return node if isinstance(node, nodes.Const) else _own(CHECK, node)


CHANGES: dict[type[nodes.Node], Callable[[Any], Any]] = {
    nodes.For: _count_loop,
    nodes.Output: _count_text,
    nodes.Concat: _count_concat,
    nodes.List: _count_value,
    nodes.Dict: _count_value,
    nodes.Tuple: _count_tuple,
    nodes.Getitem: _count_slice,
    nodes.Pair: _check_key,
    nodes.Compare: _check_sides,
}


def _budget(context: Context) -> Budget:
    return cast(Sandbox, context.environment).budget


@pass_context
def _finalize(context: Context, value: Any) -> str:
    """Charges what is written, and turns it into text."""
    budget = _budget(context)
    if not isinstance(value, str):
        budget.weigh(value)
        value = str(value)
    text: str = budget.made(value)
    return text


@pass_context
def _step(context: Context, value: bool) -> bool:
    _budget(context).work(1)
    return value


@pass_context
def _take(context: Context, size: int) -> None:
    _budget(context).take(size)


@pass_context
def _made(context: Context, value: Any) -> Any:
    return _budget(context).made(value)


@pass_context
def _check(context: Context, value: Any) -> Any:
    _budget(context).weigh(value)
    return value


@pass_context
def _concat(context: Context, parts: list[Any]) -> str:
    budget = _budget(context)
    budget.work(1)
    for part in parts:
        budget.weigh(part)
    joined = (markup_join if context.eval_ctx.autoescape else str_join)(parts)
    return budget.made(joined)


OWN_FILTERS = {STEP: _step, TAKE: _take, MADE: _made, CHECK: _check, CONCAT: _concat}


def _bounded(name: str, function: Any, is_test: bool = False) -> Callable[..., Any]:
    """A filter or test that is charged for."""
    passes = PassArg.from_obj(function)
    walks = not is_test and name in WALKING_FILTERS
    lists = not is_test and name in LISTING_FILTERS
    size = None if is_test else FILTER_SIZES.get(name)

    @wraps(function)
    def bounded(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _budget(context)
        budget.work(1)
        for item in (value, *args, *kwargs.values()):
            budget.weigh(item)
        if walks and isinstance(value, (str, range, *CONTAINERS)):
            budget.walk(len(value))
        if lists and isinstance(value, str):
            budget.take(CHAR_ITEM_BYTES * len(value))
        if size is not None:
            budget.take(size(value, *args, **kwargs))
        match passes:
            case PassArg.context:
                args = (value, *args)
                return budget.made(function(context, *args, **kwargs))
            case PassArg.eval_context:
                return budget.made(function(context.eval_ctx, value, *args, **kwargs))
            case PassArg.environment:
                return budget.made(function(context.environment, value, *args, **kwargs))
        return budget.made(function(value, *args, **kwargs))

    return pass_context(bounded)


@pass_context
def _join(context: Context, value: Any, d: Any = "", attribute: str | int | None = None) -> str:
    """jinja2's, of a list whose size is known."""
    environment: Any = context.environment
    items = list(value)
    if attribute is not None:
        items = [_item(environment, item, attribute) for item in items]
    separator = str(d)
    _budget(context).take(_joined_size(_budget(context), separator, items))
    return sync_do_join(context.eval_ctx, items, separator)


def _joined_size(budget: Budget, separator: str, items: list[Any]) -> int:
    return sum(map(budget.weigh, items)) + len(separator) * len(items)


@pass_context
def _format(context: Context, value: Any, *args: Any, **kwargs: Any) -> str:
    budget = _budget(context)
    weight = sum(map(budget.weigh, (*args, *kwargs.values())))
    budget.take(_format_size(str(value), weight))
    return do_format(value, *args, **kwargs)


@pass_context
def _sum(context: Context, iterable: Any, attribute: Any = None, start: Any = 0) -> Any:
    """jinja2's, each addition charged for."""
    environment: Any = context.environment
    for item in iterable:
        added = item if attribute is None else _item(environment, item, attribute)
        start = environment.call_binop(context, "+", start, added)
    return start


def _item(environment: Any, item: Any, attribute: str | int) -> Any:
    """A value of an item by a path such as "a.b"."""
    for part in str(attribute).split("."):
        item = environment.getitem(item, int(part) if part.isdigit() else part)
    return item


def _check_product(budget: Budget, left: Any, right: Any) -> None:
    """Of texts and lists the result is charged for; whole numbers are kept small."""
    for value, count in ((left, right), (right, left)):
        if isinstance(value, str | list | tuple) and isinstance(count, int):
            budget.take(max(0, count) * (budget.weigh(value) + ITEM_BYTES * _length(value)))
            return
    bits = sum(value.bit_length() for value in (left, right) if isinstance(value, int))
    if bits > MAX_BITS:
        raise TemplateLimitError(f"it makes a number of more than {MAX_BITS} bits")


def _length(value: Any) -> int:
    return 0 if isinstance(value, str) else len(value)


def _check_method(
    budget: Budget, method: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Charges for a method of a text, list or dict, and returns its arguments."""
    owner, name = method.__self__, method.__name__
    if isinstance(owner, list | tuple | dict):
        budget.weigh(owner)
        return args
    if not isinstance(owner, str) or not hasattr(str, name) or name == "translate":
        kind = type(owner).__name__
        raise jinja2.TemplateRuntimeError(f"the method {name} of {kind} is not offered")
    if name == "join" and args:
        items = list(args[0])
        budget.take(_joined_size(budget, owner, items))
        return (items, *args[1:])
    budget.take(len(owner) >> 3)
    size = METHOD_SIZES.get(name)
    if size is not None:
        named = {name: value for name, value in kwargs.items() if not name.startswith("_")}
        budget.take(size(owner, *args, **named))
    return args


def _format_size(pattern: str, weight: int) -> int:
    """At most, of a text made by % or format; wide fields are refused."""
    keyed = r"\d{4}|\*" if "%(" in pattern else r"%[^%a-zA-Z]*(\d{4}|\*)"
    if re.search(keyed if "%" in pattern else r"\d{4}|\{[^}]*\{", pattern):
        raise TemplateLimitError("it asks for fields of a width of more than 999")
    fields = pattern.count("%") + pattern.count("{")
    return len(pattern) + fields * (1000 + weight)


def _replaced_size(value: Any, old: str, new: str, *_: Any, **__: Any) -> int:
    text = str(value)
    return len(text) + text.count(old) * len(new)


def _padded_size(_: Any, width: int = 80, *__: Any) -> int:
    return 4 * max(0, width)


def _indented_size(text: Any, width: int | str = 4, *_: Any, **__: Any) -> int:
    text = str(text)
    each = len(width) if isinstance(width, str) else max(0, width)
    return len(text) + len(text.splitlines()) * each


def _split_size(text: str, sep: str | None = None, *_: Any, **__: Any) -> int:
    parts = text.count(sep) if sep else len(text) // 2
    return CHAR_ITEM_BYTES * (1 + parts)


def _rounded_size(_: Any, precision: int = 0, *__: Any, **___: Any) -> int:
    if abs(precision) > 308:
        raise TemplateLimitError(f"it rounds to {precision} places, more than 308")
    return 0


# What is made at most, for what may make much of little.
FILTER_SIZES: dict[str, Callable[..., int]] = {
    "batch": lambda _, linecount, *__, **___: ITEM_BYTES * max(0, linecount),
    "center": _padded_size,
    "indent": _indented_size,
    "replace": _replaced_size,
    "round": _rounded_size,
    "slice": lambda _, slices, *__, **___: ITEM_BYTES * max(0, slices),
    "wordcount": lambda text: CHAR_ITEM_BYTES * len(str(text)) // 2,
}
METHOD_SIZES: dict[str, Callable[..., int]] = {
    "center": _padded_size,
    "ljust": _padded_size,
    "rjust": _padded_size,
    "zfill": _padded_size,
    "expandtabs": lambda text, tabsize=8: len(text) + text.count("\t") * max(0, tabsize),
    "replace": _replaced_size,
    "split": _split_size,
    "rsplit": _split_size,
    "splitlines": lambda text, *_, **__: ITEM_BYTES * len(text) // 8,
}
