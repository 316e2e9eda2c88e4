"""Which templates may be rendered on the event loop."""

import pytest

from frontend.text.chat_template import ChatTemplate
from frontend.text.plain_template import MOST_SOURCE, NotHere
from tests import templates

SOURCES = [source for name, source in vars(templates).items() if name.isupper() and isinstance(source, str)]
PLAIN = [
    "{{ messages | map(attribute='role') | join(', ') }}", "{{ messages[0].content.split('a')[-1].strip() }}",
    "{{ messages[0].content | replace('a', 'b') | upper | trim }}", "{{ '{}!'.format(messages[0].content) }}",
    "{% set ns = namespace(a='') %}{% for m in messages %}{% set ns.a = ns.a + m.content %}{% endfor %}{{ ns.a }}",
    "{% set ns = namespace(a=[]) %}{% for m in messages %}{% set ns.a = ns.a + [m] %}{% endfor %}{{ ns.a | length }}",
    "{% macro show(m, first) %}{{ m.content if first else '' }}{% endmacro %}{{ show(messages[0], true) }}",
    "{{ {'a': messages[0].content} | tojson(indent=4) }}{{ '-' * 20 }}{{ 5 % 2 }}{{ strftime_now('%d %b') }}",
]  # fmt: skip
NOT_PLAIN = [
    "{{ 'a' | center(10**9) }}", "{{ 'a'.zfill(10**9) }}", "{{ ''['ljust'](10**9) }}", "{{ lipsum(10**9) }}",
    "{% set f = 'a'.ljust %}{{ f(10**9) }}", "{% set range = 'a'.ljust %}{{ range(10**9) }}",
    "{% macro m(f) %}{{ f(10**9) }}{% endmacro %}{{ m('a'.ljust) }}", "{{ '{:999999999}'.format(1) }}",
    "{{ '{0:{1}}'.format(1, 10**9) }}", "{{ messages[0].content.replace('', messages[0].content) }}",
    "{{ messages | join(messages[0].content) }}", "{{ 'a' | indent(10**9) }}", "{{ [1] | tojson(indent=10**9) }}",
    "{{ ['a'] | map('center', 10**9) | list }}", "{{ strftime_now('%999999999Y') }}",
    "{% set ns = namespace(a=[1]) %}{% set ns.a = [ns.a, ns.a] %}", "{% set a = [1, b] %}{% set c = {'x': a} %}",
    "{% set a = [b] %}{% for one in a %}{% set c = [one, one] %}{% endfor %}", "{% set a = dict(b=c) %}{{ [a, a] }}",
    "{% for a in b recursive %}{{ loop(a) }}{% endfor %}", "{% include 'a' %}", "{{ ''|attr('ljust') }}",
    "{{ messages[0].content | replace(*a) }}", "{{ 'a' }}" * (MOST_SOURCE // 9 + 1),
]  # fmt: skip


def runs_here(source: str) -> bool:
    try:
        ChatTemplate({"default": source}, {}).render([{"role": "user", "content": "abc"}])
    except NotHere as elsewhere:
        assert not elsewhere.slow
        return False
    return True


@pytest.mark.parametrize("source", PLAIN)
def test_what_real_templates_do_is_plain(source: str) -> None:
    assert runs_here(source)
    asked = [{"role": "user", "content": "abc"}]
    alone = ChatTemplate({"default": source}, {}, expendable=True)
    assert ChatTemplate({"default": source}, {}).render(asked) == alone.render(asked)


@pytest.mark.parametrize("source", NOT_PLAIN)
def test_what_may_take_all_memory_is_not(source: str) -> None:
    assert not runs_here(source)


def test_templates_of_model_families_are_plain() -> None:
    assert len(SOURCES) > 5
    for source in SOURCES:
        try:
            ChatTemplate({"default": source}, {"bos_token": "", "eos_token": ""}).render(
                [{"role": "user", "content": "abc"}]
            )
        except NotHere:
            pytest.fail(source[:200])


@pytest.mark.parametrize(
    "grows",
    [
        "{% set ns.x = ns.x ~ ns.x %}", "{% set ns.x = ns.x + ns.x %}", "{% set ns.x = [ns.x, ns.x] | join %}",
        "{% set ns.x = ns.x * 2 %}", "{% set ns.l = ns.l + ns.l %}", "{% set ns.n = ns.n * ns.n %}",
        "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}",
    ],
)  # fmt: skip
def test_what_grows_in_a_loop_is_ended(grows: str) -> None:
    source = "{% set ns = namespace(x='ab', l=[1, 2], n=3) %}{% for i in range(60) %}" + grows + "{% endfor %}"
    with pytest.raises(NotHere):
        ChatTemplate({"default": source}, {}).render([{"role": "user", "content": "abc"}])
