"""A Lark grammar and its form within a JSON string allow the same texts."""

import json
import random

import pytest
from llguidance import LLMatcher, LLTokenizer

from frontend.structured_output.lark_in_json import Unsupported, in_json

BYTES = LLTokenizer("byte")
PATCH = r"""start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?
hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF
%import common.LF
"""


def accepts(grammar: str, text: str) -> bool:
    matcher = LLMatcher(BYTES, json.dumps({"grammars": [{"lark_grammar": grammar}]}), log_level=0)
    assert not matcher.get_error()
    data = text.encode()
    return matcher.try_consume_tokens(list(data)) == len(data) and matcher.is_accepting()


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


EXAMPLES: list[tuple[str, list[str], list[str]]] = [
    (
        PATCH,
        ['*** Begin Patch\n*** Add File: a\\b.py\n+print("x\\n")\n+\n*** End Patch\n',
         '*** Begin Patch\n*** Update File: ü\n@@ def "f"\n-a\n+\tb\n*** End of File\n*** End Patch'],
        ["*** Begin Patch\n*** End Patch\n", "*** Begin Patch\n*** Add File: \n+\n*** End Patch", "x"],
    ),
    (r'start: /\s+"x"/ "Y\n"i', [' \n\t"x"y\n', '\x0b"x"Y\n'], ['"x"y\n', ' "X"y\n']),
    (r"start: /./ /(?s:.)/ /[^\n]/s", ["a\na", '"\\\t'], ["\naa", "aa\n"]),
    (r'start: "\u0001".."A"', ["\x02", '"', "\n", "A"], ["B", "\x00"]),
    (r'start: /[\n"b-d]{2,3}/', ['\n"', "bcd"], ["\n", "ab", "bbbb"]),
    (
        'start: A B\nA: /\\x5c{2}[\\x00-\\x1f]|ü/i\nB: C* "!"\nC: ("\\"" | /[ab]/)',
        ["\\\\\x1f!", 'Ü"a!'],
        ["\\!"],
    ),
    ('start: a b\na: "x"\nb: "y"\n%import common (WS, INT)\n%ignore WS', ["x \n\ty", "xy"], ["x\\y", "x1y", "xy "]),
    (r"start: /[^\\]\/[\W]\p{L}\D/", ['"/"é\n'], ['\\/-ab', '"/"é1']),
    (
        'start: ESCAPED_STRING ["," NUM]\n%import common.ESCAPED_STRING\n%import common.INT -> NUM',
        ['"a\\"",12', '"\n"'],
        ['"a', '"a",'],
    ),
    ('start: (/a|\\n/ | "b")~2 // two\n', ["\nb", "aa"], ["\n"]),
    (r"start: /a+?(?:\t|)(x|(y\\))*$/", ["aa\txy\\", "a"], ["a\t\t", "ay"]),
]  # fmt: skip


@pytest.mark.parametrize(("grammar", "good", "bad"), EXAMPLES)
def test_texts_are_allowed_within_json_that_are_allowed_without(grammar: str, good: list[str], bad: list[str]) -> None:
    made = in_json(grammar)
    for text in [*good, *bad]:
        assert accepts(grammar, text) == accepts(made, quoted(text)) == (text in good), text


def test_no_text_is_allowed_that_is_no_json() -> None:
    made = in_json(PATCH)
    draw = random.Random(7)
    for _ in range(20):
        matcher = LLMatcher(BYTES, json.dumps({"grammars": [{"lark_grammar": made}]}), log_level=0)
        text: list[int] = []
        while len(text) < 120:
            mask = matcher.compute_logit_bias()
            allowed = [one for one in range(256) if mask[one]]
            if not allowed:
                assert matcher.is_accepting(), bytes(text)
                break
            text.append(draw.choice([one for one in allowed if 32 <= one < 127 or one == 92] or allowed))
            assert matcher.consume_tokens([text[-1]])
        if matcher.is_accepting():
            whole = json.loads(f'"{bytes(text).decode()}"')
            assert accepts(PATCH, whole), whole


@pytest.mark.parametrize(
    "grammar",
    [
        'start: A\nA: /a/ & "a"', "start: A\nA: ~/a/", "start: <[3]>", "start: %json {}", 'start: a\na[lazy]: /a/',
        "start: /[[:alpha:]]/", "start: /(?x: a)/", r"start: /[\p{P}]/", "start: A\n%import other.A", "start: /[a&&b]/",
    ],
)  # fmt: skip
def test_what_has_no_form_within_json_is_said(grammar: str) -> None:
    with pytest.raises(Unsupported):
        in_json(grammar)
