"""The sandbox of templates: what it prints, what it forbids, where it stops."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import jinja2
import pytest

from frontend.tokenizer.template_limits import MAX_CHARACTERS, MAX_STEPS, LimitPassed
from frontend.tokenizer.template_sandbox import Refused, TemplateEnvironment, bounded

THEN = datetime(2024, 7, 26, 12, 30, tzinfo=UTC)


def rendered(source: str, **values: Any) -> str:
    """The template's text."""
    environment = TemplateEnvironment(lambda: THEN)
    with environment.budget():
        return bounded(environment.from_string(source).generate(values))


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (
            "{% for x in xs %}{{ loop.index }}/{{ loop.length }}{{ x }}{% if not loop.last %},{% endif %}{% endfor %}",
            "1/2a,2/2b",
        ),
        ("{% for x in [1, 2] %}{{ x }}{% endfor %}{% for x in [1, 2] %}{{ x }}{% endfor %}", "1212"),
        ("{% for x in missing %}x{% else %}none{% endfor %}", "none"),
        ("{% for x in xs if x != 'a' %}{{ x }}{% endfor %}", "b"),
        ("{% for x in xs %}{% if loop.last %}{% break %}{% endif %}{{ x }}{% endfor %}", "a"),
        ("{% for x in range(3) %}{{ x }}{% endfor %}", "012"),
        ("{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}", "a1"),
        ("{% for x in [[1, []], [2, []]] recursive %}{{ x[0] }}{{ loop(x[1]) }}{% endfor %}", "12"),
        ("{% macro f(x) %}[{{ x }}]{% endmacro %}{{ f(1) }}{{ f('b') }}", "[1][b]"),
        ("{% macro f() %}<{{ caller() }}>{% endmacro %}{% call f() %}in{% endcall %}", "<in>"),
        ("{% set ns = namespace(n=0) %}{% for x in xs %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "2"),
        ("{{ 'a' ~ 1 ~ xs[0] }}{{ 'a' + 'b' }}{{ 'ab' * 2 }}{{ 2 ** 5 }}{{ 2 + 3 }}", "a1aabab" + "ab325"),
        ("{% generation %}in{% endgeneration %} out", "in out"),
        ("{{ {'a': '<\u00e9>'} | tojson }}", '{"a": "<\u00e9>"}'),
        ("{{ {'b': 1, 'a': [1]} | tojson(indent=1, sort_keys=true) }}", '{\n "a": [\n  1\n ],\n "b": 1\n}'),
        ("{{ strftime_now('%d %b %Y') }}", "26 Jul 2024"),
        ("{{ 'a b'.replace(' ', '-') }}{{ ', '.join(xs) }}{{ xs | join('+') }}{{ 'x'.ljust(3) }}|", "a-ba, ba+bx  |"),
        ("{{ '%s=%05.1f' % ('a', 2) }}{{ '{:>3}{}'.format(1, 'b') }}{{ 'a\nb' | indent(2) }}", "a=002.0  1ba\n  b"),
        (
            "{{ 'Ab'.upper() }}{{ 'a,b'.split(',') | length }}{{ 'x' | replace('x', 'y') }}{{ 'c' | center(3) }}",
            "AB2y c ",
        ),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
    ],
)
def test_what_templates_print(source: str, text: str) -> None:
    assert rendered(source, xs=["a", "b"]) == text


def test_the_template_s_own_refusal() -> None:
    with pytest.raises(Refused, match="no system role"):
        rendered("{{ raise_exception('no system role') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ xs.append(1) }}",
        "{{ xs.append.__self__.__class__ }}",
        "{% set xs.a = 1 %}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_ways_out_are_closed(source: str) -> None:
    with pytest.raises(jinja2.TemplateError):
        rendered(source, xs=[])


@pytest.mark.parametrize("source", ["{{ xs.__class__ }}", "{{ '{0.__class__}'.format(xs) }}"])
def test_hidden_attributes_print_nothing(source: str) -> None:
    assert rendered(source, xs=[]) == ""


ENDLESS = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% set ns = namespace(s='ab') %}{% for a in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "{% set ns = namespace(s='ab') %}{% for a in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "{{ 'ab' * 999999999 }}",
    "{{ 999999999 * 'ab' }}",
    "{{ [1] * 999999999 }}",
    "{{ 9 ** 999999999 }}",
    "{{ 'a'.center(999999999) }}",
    "{{ 'a'.ljust(width=999999999) }}",
    "{{ ('a' * 9999).replace('', 'b' * 9999) }}",
    "{{ ('a' * 9999).join('b' * 9999) }}",
    "{{ ('a' * 9999).join(['b'] * 9999) }}",
    "{{ ('\t' * 9999).expandtabs(9999) }}",
    "{{ '%999999999s' % 1 }}",
    "{{ '%*d' % (999999999, 1) }}",
    "{{ '%.999999999f' % 1 }}",
    "{{ '%-+ #0999999999.3f' % 1 }}",
    "{{ '%(a)999999999s' % {'a': 1} }}",
    "{{ '%((a))999999999s' % {'(a)': 1} }}",
    "{{ ('%(a)9999999s' * 99) % {'a': 1} }}",
    "{{ ('%9999999s' * 99) | format(*([1] * 99)) }}",
    "{{ '{:>999999999}'.format(1) }}",
    "{{ '{:{}}'.format(1, 999999999) }}",
    "{{ '{:>{}}'.format(1, 999999999) }}",
    "{{ ('{0:{1}}' * 99).format(1, 9999999) }}",
    "{{ ('{:>9999999}' * 99).format(*([1] * 99)) }}",
    "{{ '{:>{0[w]}}'.format({'w': 999999999}) }}",
    "{{ '{:.{}f}'.format(1, 999999999) }}",
    "{{ '{a:>{b}}'.format_map({'a': 1, 'b': 999999999}) }}",
    "{{ ('{:>999999999}' | escape).format(1) }}",
    "{{ ('{:>999999999}' | attr('format'))(1) }}",
    "{{ ['%999999999s'] | map('format', 1) | list }}",
    "{{ 'a' | center(999999999) }}",
    "{{ 'a' | indent(999999999) }}",
    "{{ ('a' * 9999) | replace('', 'b' * 9999) }}",
    "{{ (['a' * 9999] * 9999) | join }}",
    "{{ (['a'] * 9999) | join('b' * 9999) }}",
    "{{ '%999999999s' | format(1) }}",
    "{{ [1] | batch(999999999, 0) | list }}",
    "{% set s = 'a' * 9999999 %}{% for a in range(99999) %}{{ s }}{% endfor %}",
]


@pytest.mark.parametrize("source", ENDLESS)
def test_no_template_runs_or_grows_without_end(source: str) -> None:
    started = time.thread_time()
    tracemalloc.start()
    try:
        with pytest.raises(LimitPassed, match=r"steps|characters|bits|longer|wider"):
            rendered(source)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert time.thread_time() - started < 2.0
    assert most < 4 * MAX_CHARACTERS


def test_a_range_is_short() -> None:
    with pytest.raises(OverflowError):
        rendered("{{ range(999999999) }}")


def test_steps_are_counted_for_each_rendering() -> None:
    environment = TemplateEnvironment(lambda: THEN, clock=lambda: 0.0)
    template = environment.from_string("{% for x in xs %}{% endfor %}")

    def values(count: int) -> Iterator[int]:
        return iter(range(count))

    for _ in range(2):
        with environment.budget():
            bounded(template.generate(xs=values(MAX_STEPS)))
    with environment.budget(), pytest.raises(LimitPassed, match=str(MAX_STEPS)):
        bounded(template.generate(xs=values(MAX_STEPS + 1)))


def test_time_is_counted() -> None:
    ticks = iter(range(1_000_000))
    environment = TemplateEnvironment(lambda: THEN, clock=lambda: float(next(ticks)))
    with environment.budget(), pytest.raises(LimitPassed, match="longer than"):
        bounded(environment.from_string("{% for x in range(9999) %}{% endfor %}").generate())
