"""Roles that only some chat templates support reach the prompt as text, or are refused by name."""

from typing import Any

import pytest

from frontend.api.openai import chat
from frontend.errors import SluiceError
from frontend.model_context import ModelContext
from frontend.output_parser.model_format import ModelFormat
from frontend.text.chat_template import ChatTemplate
from frontend.text.tokenizer import Tokenizer
from tests.fakes import MODEL
from tests.fakes import context as context_of
from tests.frontend.api.harness import parse
from tests.templates import LLAMA3, QWEN3

USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}
STRICT = """\
{% for m in messages %}
{% if m.role not in ['user', 'assistant', 'ipython'] %}{{ raise_exception('Unexpected role.') }}{% endif %}
{{ m.content }}
{% endfor %}
"""


def context(tokenizer: Tokenizer, source: str) -> ModelContext:
    sources = {"default": source}
    template = ChatTemplate(sources, {"bos_token": ""})
    return context_of(tokenizer, max_seq_len=8192, template=template, style=ModelFormat.of(sources))


async def prompt(model: ModelContext, *messages: Any, **more: Any) -> list[int]:
    return (await parse(chat, {"model": MODEL, "messages": list(messages), "max_tokens": 5} | more, model)).prompts[0]


async def test_role_that_the_template_knows_is_rendered(tokenizer: Tokenizer) -> None:
    result = {"role": "ipython", "content": "20"}
    ids = await prompt(context(tokenizer, LLAMA3), USER, result, ANSWER, USER)
    assert '<|start_header_id|>ipython<|end_header_id|>\n\n"20"<|eot_id|>' in tokenizer.decode(ids)
    continued = await prompt(context(tokenizer, LLAMA3), USER, result | {"role": "note"}, continue_final_message=True)
    assert tokenizer.decode(continued).endswith("note<|end_header_id|>\n\n20")


async def test_special_tokens_in_a_role_are_text(tokenizer: Tokenizer) -> None:
    model = context(tokenizer, "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}")
    forged = {"role": "a</s>b", "content": "c</s>"}
    ids = await prompt(model, USER, forged)
    assert 265 not in ids and tokenizer.decode(ids, skip_special=False) == "user: hia</s>b: c</s>"


@pytest.mark.parametrize(("source", "words", "messages", "at"), [
    (STRICT, "Unexpected role.", [USER, {"role": "ipython", "content": "x"}, {"role": "odd", "content": "x"}], 2),
    (STRICT, "Unexpected role.", [{"role": "odd", "content": "x"}], 0),
    (QWEN3, "leaves such messages out", [USER, ANSWER, USER, {"role": "context", "content": "x"}, USER], 3),
])  # fmt: skip
async def test_role_that_the_template_does_not_know_is_refused_and_named(
    tokenizer: Tokenizer, source: str, words: str, messages: list[Any], at: int
) -> None:
    with pytest.raises(SluiceError, match=words) as refused:
        await prompt(context(tokenizer, source), *messages)
    assert (refused.value.status, refused.value.param) == (422, f"messages[{at}].role")
    assert repr(messages[at]["role"]) in refused.value.message


async def test_refusal_for_another_reason_names_no_role(tokenizer: Tokenizer) -> None:
    with pytest.raises(SluiceError, match="Unexpected role") as refused:
        await prompt(context(tokenizer, STRICT), {"role": "system", "content": "x"}, {"role": "ipython", "content": ""})
    assert refused.value.param == "messages"
