from __future__ import annotations

import itertools
import tracemalloc

import jinja2
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from scheduler_service.template_sandbox import (
    LOOK_STEPS,
    Budget,
    Sandbox,
    TemplateLimitError,
    TemplateTimeoutError,
)

MANY = "{% for i in range(99999) %}"
END = "{% endfor %}"
BIG = "{% set big = 'a' * 300000 %}"
# A list of two lists that are the same one, sixty times.
TWICE = "{% set ns = namespace(a=[1]) %}"
TWICE += "{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}{% endfor %}"
TUPLES = TWICE.replace("[1]", "(1,)").replace("[ns.a, ns.a]", "(ns.a, ns.a)")
VIEWS = TWICE.replace("[1]", "{1: 1}").replace("[ns.a, ns.a]", "{1: ns.a.items(), 2: ns.a.items()}")
GROWING = "{% set ns = namespace(a='ab', b=[1], n=3) %}" + MANY
MEGABYTE = 1 << 20
STEPS = 200_000


def run(source, max_bytes=MEGABYTE, look_ns=0, **variables):
    """look_ns: what passes between two looks at the clock."""
    sandbox = Sandbox(extensions=["jinja2.ext.loopcontrols"])
    sandbox.globals["endless"] = itertools.count
    clock = itertools.count(0, look_ns).__next__ if look_ns else lambda: 0
    budget = Budget(max_bytes, 10**9, max_steps=STEPS, clock=clock)
    return sandbox.run(sandbox.compile_bounded(source), budget, variables)


@pytest.mark.parametrize(
    "source",
    [
        "",
        "a{% if x %}{{ x }}{% else %}-{% endif %}b",
        "{{ x.a.b }}|{{ x['a']['b'] }}|{{ x.get('c', 1) }}|{{ x.a | default('z') }}|{{ y[-1] }}",
        "{% for k, v in x.items() %}{{ loop.index }}{{ k }}={{ v }}{{ ',' if not loop.last }}"
        "{% endfor %}",
        "{% for i in y if i != 2 %}{{ i }}{% else %}none{% endfor %}{{ y[1:] }}{{ y[::-1] }}",
        "{% macro f(a, b=2) %}{{ a ~ b }}{{ caller() if caller }}{% endmacro %}{{ f(1) }}"
        "{{ f(1, b=[3]) }}",
        "{% macro f() %}<{{ caller() }}>{% endmacro %}{% call f() %}x{% endcall %}",
        "{% for i in [[1, [2]], [3]] recursive %}{{ loop(i) if i is iterable else i }}{% endfor %}",
        "{% set ns = namespace(n=0) %}{% for i in y %}{% set ns.n = ns.n + i %}{% endfor %}"
        "{{ ns.n }}",
        "{{ 'a' + 'b' }}{{ 3 * 'ab' }}{{ [1] * 2 + [2] }}{{ 7 // 2 }}{{ 7 % 4 }}{{ 2 ** 10 }}"
        "{{ -3 / 2 }}",
        "{{ '%s-%03d' % ('a', 7) }}{{ '%s' | format('x') }}{{ '{:>4}{a}'.format(1, a=2) }}",
        "{{ y | join(', ') }}{{ z | join('-', attribute='n.m') }}{{ 'ab' | join }}"
        "{{ '-'.join(['a']) }}",
        "{{ y | sum }}{{ z | sum(attribute='n.m', start=1) }}{{ y | max }}"
        "{{ y | sort(reverse=true) }}",
        "{{ z | map(attribute='n') | list }}{{ y | map('string') | join }}"
        "{{ y | select('odd') | list }}",
        "{{ z | selectattr('k', 'equalto', 'q') | list | length }}"
        "{{ y | reject('in', [1]) | list }}",
        "{{ 'a-b'.split('-') }}{{ ' a '.strip() }}{{ 'a'.center(5) }}"
        "{{ 'a\\tb'.expandtabs(tabsize=4) }}",
        "{{ 'aXa' | replace('a', 'bb') }}{{ 'aXa'.replace('a', 'b', 1) }}{{ 'x' | center(9) }}|",
        "{{ 'a\\nb' | indent(2, true) }}{{ 'ab c' | title }}{{ 2.567 | round(1) }}"
        "{{ y | batch(2) | list }}",
        "{{ y == [1, 2, 3] }}{{ x == x }}{{ 2 in y }}{{ 'a' in x }}{{ y < y + [1] }}"
        "{{ 1 < y[1] < 3 }}",
        "{% filter upper %}ab{{ y }}{% endfilter %}{% set t %}c{{ y }}{% endset %}{{ t }}"
        "{{ t | length }}",
        "{% block a %}b{{ y }}{% endblock %}{{ self.a() }}{% autoescape true %}{{ '<' ~ '>' }}"
        "{% endautoescape %}",
        "{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{{ dict(a=1) }}"
        "{{ {y[0]: 'v'} }}",
        "{% for i in y %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}"
        "{{ (1, 2) }}{{ nothing }}",
        "{{ x | dictsort }}{{ x | items | list }}{{ y | first }}{{ y | last }}"
        "{{ [1, 2, 1] | unique | list }}",
    ],
)
def test_templates_write_what_they_write_without_bounds(source):
    variables = {"x": {"a": {"b": "c"}}, "y": [1, 2, 3], "z": [{"n": {"m": 4}, "k": "q"}]}
    plain = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    assert run(source, **variables) == plain.from_string(source).render(variables)


@pytest.mark.parametrize(
    "source",
    [
        MANY * 4 + END * 4,
        MANY + "{% for j in range(99999) if false %}{% endfor %}" + END,
        "{% for i in endless() %}{% endfor %}",
        "{% for i in [18] recursive %}{% if i %}{{ loop([i - 1, i - 1]) }}{% endif %}{% endfor %}",
        "{% macro f() %}{% endmacro %}" + MANY * 2 + "{% set x = f() %}" + END * 2,
        "{% macro f(n) %}{% if n %}{% set x = f(n - 1) %}{% set x = f(n - 1) %}{% endif %}"
        "{% endmacro %}{{ f(40) }}",
        "{% block a %}{% endblock %}" + MANY * 2 + "{% set x = self.a() %}" + END * 2,
        MANY + "{% set x = range(99999) | map('abs') | max %}" + END,
        MANY + "{% set x = range(99999) | select('odd') | first %}" + END,
        MANY + "{% set x = range(99999) | map(attribute='real') | max %}" + END,
        MANY + "{% set x = range(99999) | sum %}" + END,
        MANY + "{% set x = range(99999) | max %}" + END,
    ],
)
def test_a_template_that_works_for_ever_ends_at_its_last_step(source):
    with pytest.raises(TemplateLimitError, match="more than 200000 steps"):
        run(source, max_bytes=1 << 40)


@pytest.mark.parametrize(
    "work", ["", "{% if big is upper %}{% endif %}", "{% if big == also %}{% endif %}"]
)
def test_a_rendering_has_its_time(work):
    """The clock is looked at once in LOOK_STEPS, and sooner where steps are large."""
    source = "{% set big = 'a' * 300000 %}{% set also = 'a' * 300000 %}" + MANY + work + END
    with pytest.raises(TemplateTimeoutError, match="longer than 1000 ms"):
        run(source, max_bytes=1 << 40, look_ns=20_000_000)
    assert run(source.replace("99999", str(LOOK_STEPS // 8)), max_bytes=1 << 40) == ""


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10 ** 10 }}",
        "{{ 10 ** 10 * 'a' }}",
        "{{ 'a' * 10000000000 }}",
        "{{ [0] * 10 ** 10 }}",
        "{{ ('a' * 1000) * 1000 * 1000 }}",
        GROWING + "{% set ns.a = ns.a + ns.a %}" + END,
        GROWING + "{% set ns.a = ns.a ~ ns.a %}" + END,
        GROWING + "{% set ns.b = ns.b + ns.b %}" + END,
        GROWING + "{% set ns.b = [ns.b, [" + "0," * 1000 + "]] %}" + END,
        GROWING
        + "{% set ns.b = [ns.b, {"
        + "".join(f"{i}: 0," for i in range(1000))
        + "}] %}"
        + END,
        GROWING + "{% set ns.b = (ns.b, range(9999) | list) %}" + END,
        BIG + GROWING + "{% set ns.b = [ns.b, big[1:]] %}" + END,
        BIG + GROWING + "{% set ns.b = [ns.b, big | upper] %}" + END,
        BIG + GROWING + "{% set ns.b = [ns.b, big.upper()] %}" + END,
        MANY + "x" * 1000 + END,
        MANY + "{{ i }}" + "y" * 100 + END,
        "{% macro f() %}" + "x" * 1000 + "{% endmacro %}" + MANY + "{% set x = f() %}" + END,
        MANY + "{% set x %}" + "x" * 1000 + "{% endset %}" + END,
        "{{ 'a' | center(10 ** 10) }}",
        "{{ 'a' | center(10000000000) }}",
        "{{ 'a'.center(10 ** 10) }}",
        "{{ 'a'.ljust(10 ** 10) }}",
        "{{ 'a'.rjust(10 ** 10) }}",
        "{{ 'a'.zfill(10 ** 10) }}",
        "{{ '\t'.expandtabs(10 ** 10) }}",
        "{{ ('a\n' * 1000) | indent(10 ** 8) }}",
        BIG + "{{ ('a\r' * 1000) | indent(big) }}",
        "{{ '%09999999999d' % 1 }}",
        "{{ '%.9999999999f' % 1.0 }}",
        "{{ '%*d' % (10 ** 10, 1) }}",
        "{{ '%(a)9999999999d' % {'a': 1} }}",
        "{{ '%09999999999d' | format(1) }}",
        "{{ '{:9999999999}'.format(1) }}",
        "{{ '{:{}}'.format(1, 10 ** 10) }}",
        "{{ '{a:9999999999}'.format_map({'a': 1}) }}",
        "{% set f = '{:9999999999}'.format %}{{ f(1) }}",
        BIG + "{{ ('{0}' * 1000).format(big) }}",
        BIG + "{{ '%s%s%s%s%s' | format(big, big, big, big, big) }}",
        BIG + "{{ big | replace('a', big) }}",
        BIG + "{{ big.replace('', big) }}",
        BIG + "{{ range(9999) | join(big) }}",
        BIG + "{{ big.join('a' * 10000) }}",
        BIG + "{{ ([none] * 1000) | map('default', big, true) | join }}",
        "{{ ('a' * 150000) | list }}",
        BIG + "{{ big.split('a') }}",
        BIG + "{{ big | wordcount }}",
        "{{ [1] | batch(10 ** 10, 0) | list }}",
        "{{ [1] | slice(10 ** 10) | list }}",
        "{{ ([[1]] * 10000) | sum(start=[]) }}",
        "{{ range(9999) | map('string') | map('center', 9999) | join }}",
        "{% autoescape true %}" + MANY + "{{ '<' * 1000 }}" + END + "{% endautoescape %}",
    ],
)
def test_what_grows_without_end_is_refused_before_it_is_large(source):
    tracemalloc.start()
    try:
        with pytest.raises(TemplateLimitError, match=r"bytes of values|width"):
            run(source)
        assert tracemalloc.get_traced_memory()[1] < 8 * MEGABYTE
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "use",
    [
        "{{ ns.a }}",
        "{{ ns.a | string }}",
        "{{ ns.a ~ '' }}",
        "{{ [ns.a] | join }}",
        "{{ '%s' % ns.a }}",
        "{{ '%s' % (ns.a,) }}",
        "{{ '{}'.format(ns.a) }}",
        "{{ ns.a == ns.a[0] }}",
        "{{ ns.a in [ns.a[0]] }}",
        "{{ [ns.a, ns.a] | sort }}",
        "{{ [ns.a, ns.a[0]].index(ns.a[0]) }}",
        "{{ [ns.a].count(ns.a[0]) }}",
        "{% if ns.a is eq(ns.a[0]) %}{% endif %}",
        "{% for i in [1, 2] %}{{ loop.changed(ns.a) }}{% endfor %}",
        "{{ dict(a=ns.a) }}",
        "{% macro f(x) %}{{ x }}{% endmacro %}{{ f(ns.a) }}",
        "{% for x in [1] | batch(2, ns.a) %}{{ x }}{% endfor %}",
    ],
)
@pytest.mark.parametrize("made", [TWICE, TUPLES, VIEWS])
def test_what_would_be_without_end_when_written_out_is_refused(made, use):
    if made == VIEWS:
        use = use.replace("ns.a[0]", "ns.a[1]")
    with pytest.raises(TemplateLimitError, match="characters"):
        run(made + use)


@pytest.mark.parametrize("use", ["{{ {ns.a: 1} }}", "{{ {}[ns.a] }}", "{{ {}.get(ns.a) }}"])
def test_keys_without_end_are_not_hashed(use):
    with pytest.raises(TemplateLimitError, match="characters"):
        run(TUPLES + use)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 10 ** 9999999999 }}",
        GROWING + "{% set ns.n = ns.n * ns.n %}" + END,
        "{{ ('9' * 100000) | int(base=16) // 3 }}",
        "{{ 1.5 | round(10 ** 9, 'ceil') }}",
    ],
)
def test_numbers_stay_small(source):
    with pytest.raises(TemplateLimitError, match=r"bits|places"):
        run(source)


@pytest.mark.parametrize("filter_name", ["map('upper')", "min", "groupby(0)", "reverse", "list"])
def test_no_filter_walks_over_a_whole_book(filter_name):
    with pytest.raises(TemplateLimitError, match="300000 items"):
        run(BIG + "{{ big | " + filter_name + " }}", max_bytes=1 << 40)


@pytest.mark.parametrize(
    "call", ["(1).to_bytes(9, 'big')", "dict.fromkeys([1])", "'a'.translate({97: 'b'})"]
)
def test_methods_that_are_not_offered(call):
    with pytest.raises(jinja2.TemplateError, match="not offered"):
        run("{{ " + call + " }}")


def test_a_namespace_is_not_written_out():
    assert run("{% set ns = namespace(a=1) %}{{ ns }}{{ [ns] }}") == "<Namespace>[<Namespace>]"


def test_each_rendering_has_a_budget_of_its_own():
    """Also while another one runs."""
    sandbox = Sandbox()
    inner = sandbox.compile_bounded("{{ 'a' * 900 }}")
    outer = sandbox.compile_bounded("{{ 'a' * 5000 }}{{ other() }}{{ 'a' * 5000 }}")

    def other():
        return sandbox.run(inner, Budget(3500, 1, clock=lambda: 0), {})

    text = sandbox.run(outer, Budget(40_000, 1, clock=lambda: 0), {"other": other})
    assert text == "a" * 10_900


def test_a_budget_is_not_used_up_by_earlier_renderings():
    sandbox = Sandbox()
    code = sandbox.compile_bounded("{% for i in range(1000) %}{{ 'a' * 100 }}{% endfor %}")
    for _ in range(20):
        assert sandbox.run(code, Budget(400_000, 1, clock=lambda: 0), {}) == "a" * 100_000


@pytest.mark.parametrize(
    "source",
    [
        "{{ x.__class__ }}",
        "{{ x['__class__'] }}",
        "{{ x | attr('__class__') }}",
        "{{ '{0.__class__}'.format(x) }}",
        "{{ '{x.__class__}'.format_map({'x': x}) }}",
        # CVE-2024-56326 and CVE-2025-27516: str.format got hold of in other ways.
        "{% set f = '{0.__class__}'.format %}{{ f(x) }}",
        "{{ ('{0.__class__}' | attr('format'))(x) }}",
        "{{ [x] | map(attribute='__class__') | join }}",
        "{{ [x] | map('attr', '__class__') | join }}",
        "{{ [x] | join(attribute='__class__') }}",
        "{{ [x] | sum(attribute='__class__', start='') }}",
        "{{ [x] | groupby('__class__') | map(attribute=0) | join }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ endless.__self__ }}{{ endless.__call__ }}",
        "{% macro m() %}{% endmacro %}{{ m._func }}",
        "{% for i in [1] %}{{ loop._iterable }}{% endfor %}",
        "{{ self._TemplateReference__context }}",
        "{{ namespace(a=1).__class__ }}",
        "{% include '/etc/hostname' %}",
        "{% import 'os' as os %}{{ os }}",
        "{{ [].append(1) }}",
        "{{ {}.update(a=1) }}",
    ],
)
def test_no_way_leads_to_the_insides_of_python(source):
    try:
        written = run(source, x="text")
    except (jinja2.TemplateError, TypeError):
        return
    assert written in ("", "Undefined")
