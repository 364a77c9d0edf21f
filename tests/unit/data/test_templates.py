"""A template of strangers ends with an error where it would take all memory or time, and writes what jinja writes."""

import time

import jinja2
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lmm_r1.data import templates
from lmm_r1.data.reading import PromptTemplate
from lmm_r1.data.templates import FILES, BoundedEnvironment
from lmm_r1.errors import UserError

GROWN = "{% set ns = namespace(s='aa', l=[1], n=9) %}{% for i in range(99) %}{% set ns.@ %}{% endfor %}{{ ns.s }}"


@pytest.mark.parametrize(
    "template",
    [
        *("{{ 'a' * 10**9 }}", "{{ [0] * 1000000000 }}", "{{ 10 ** (10 ** 10) }}", "{{ range(10**9) }}"),
        *(
            "{{ 'a'.center(10**9) }}",
            "{{ 'a'|center(1000000000) }}",
            "{{ 'a'.zfill(10**9) }}",
            "{{ [1]|batch(10**9) }}",
        ),
        *("{{ '%1000000000d' % 1 }}", "{{ '%*d' % (10**9, 1) }}", "{{ '%1000000000d'|format(1) }}"),
        *("{{ '{:1000000000}'.format(1) }}", "{{ '{:{}}'.format(1, 10**9) }}", "{{ ('a' * 99999)|indent(99999) }}"),
        *("{{ ('a' * 20000).join(['b'] * 20000) }}", "{{ ('{0}' * 20000).format('a' * 20000) }}"),
        *(GROWN.replace("@", each) for each in ("s = ns.s ~ ns.s", "s = ns.s + ns.s", "s = ns.s.replace('a', ns.s)")),
        *(GROWN.replace("@", each) for each in ("l = ns.l + ns.l", "n = ns.n * ns.n")),
        "{% set s = 'a' * 1000000 %}{% set x %}{% for i in range(99999) %}{{ s }}{% endfor %}{% endset %}",
        "{{ range(99999)|map('center', 99999)|list }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    ],
)
def test_a_template_without_bounds_is_ended_with_its_file(template, monkeypatch):
    monkeypatch.setattr(templates, "SECONDS", 0.5)
    monkeypatch.setitem(FILES, template, "model/chat_template.jinja")
    began = time.thread_time()
    with pytest.raises(jinja2.TemplateError, match="^model/chat_template.jinja takes more than 0.5 s, or makes"):
        BoundedEnvironment().from_string(template).render()
    assert time.thread_time() - began < 5


@pytest.mark.parametrize(
    "template", ["{{ 1 / 0 }}", "{{ none + 'a' }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"]
)
def test_what_a_template_does_wrong_is_an_error_of_the_template(template):
    with pytest.raises(jinja2.TemplateError):
        BoundedEnvironment().from_string(template).render()


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ loop.index ~ loop.last ~ loop.length ~ loop.revindex }}{{ m|trim }}{% else %}-{% endfor %}",
        "{% for m in messages if m != 'b' %}{{ loop.previtem }}{{ m }}{% endfor %}{% for x in [] %}{% else %}none{% endfor %}",
        "{{ '{:>5}|{x}'.format(1, x=2) }}{{ '%05d|%s' % (7, '1234567890') }}{{ 'abc'|replace('b', 'x')|upper|center(9) }}",
        "{% macro f(x) %}<{{ x }}>{% endmacro %}{% set y %}{{ f(1) }}{% endset %}{{ y }}{{ messages|join(',') }}{{ [1, 2]|tojson }}",
        "{{ messages[::-1] }}{{ '%s' % 'a' * 70 }}{{ 2 ** 9 * 3 % 7 + 1 }}{{ undefined_name }}{{ {'a': 1}|dictsort }}",
    ],
)
def test_any_other_template_writes_what_it_does_without_bounds(template):
    values = {"messages": ["a", " b ", "1234567890"]}
    written = ImmutableSandboxedEnvironment().from_string(template).render(**values)
    assert BoundedEnvironment().from_string(template).render(**values) == written


def test_the_prompt_template_of_a_run_is_bounded():
    template = PromptTemplate("{{ content * 10**9 }}", flag="--data.prompt_template")
    with pytest.raises(
        UserError, match="rows.jsonl line 7: --data.prompt_template cannot be filled in: .* takes more"
    ):
        template.render("a", columns={}, location="rows.jsonl line 7")
