"""Budgets for reasoning: the fields that set a budget, and the ThinkingBudget that the worker gets."""

from pathlib import Path
from typing import Any

import pytest

from frontend.api.anthropic import messages
from frontend.api.openai import chat, responses
from frontend.errors import Unprocessable
from frontend.model_context import ModelContext
from frontend.output_parser import model_format
from frontend.text.tokenizer import Tokenizer
from shared.messages import ThinkingBudget
from tests.fakes import MODEL
from tests.frontend.api.harness import parse
from tests.frontend.speaking import context_of, tokenizer_with
from tests.frontend.text.tokenizers import byte_level, save
from tests.templates import HARMONY, QWEN3

HELLO = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> ModelContext:
    return speaking(tokenizer_with(tmp_path_factory.mktemp("qwen"), QWEN3, ["</think>"]))


async def budget_of(context: ModelContext, api_format: Any = chat, **more: Any) -> ThinkingBudget | None:
    asked = {"input": "hi"} if api_format is responses else {"messages": HELLO, "max_tokens": 500}
    return (await parse(api_format, {"model": MODEL, **asked, **more}, context)).sampling.thinking


def speaking(tokenizer: Tokenizer) -> ModelContext:
    return context_of(tokenizer, vocab_size=tokenizer.vocab_size)


def ids(context: ModelContext, *texts: str) -> tuple[int, ...]:
    return tuple(id for each in context.tokenizer.encode_now(texts, False) for id in each)


@pytest.mark.parametrize("fields", [
    {"max_thinking_tokens": 20}, {"thinking_budget": 20}, {"thinking_token_budget": 20},
    {"reasoning": {"max_tokens": 20}},
    {"max_thinking_tokens": 20, "thinking_budget": 20},
])  # fmt: skip
@pytest.mark.parametrize("api_format", [chat, responses])
async def test_every_name_of_a_budget_means_the_same(
    qwen: ModelContext, api_format: Any, fields: dict[str, Any]
) -> None:
    (close,) = ids(qwen, "</think>")
    budget = ThinkingBudget(20, ids(qwen, "<think>"), close, (close,), blanks=ids(qwen, "\n", " "))
    assert await budget_of(qwen, api_format, **fields) == budget


async def test_budget_of_messages_is_that_of_thinking(qwen: ModelContext) -> None:
    enabled = {"thinking": {"type": "enabled", "budget_tokens": 20}}
    found = await budget_of(qwen, messages, **enabled)
    assert found is not None and (found.tokens, found.begun) == (20, False)
    assert await budget_of(qwen, messages, thinking={"type": "disabled"}) is None


async def test_budget_that_nothing_can_exceed_is_none(qwen: ModelContext, tokenizer: Tokenizer) -> None:
    assert await budget_of(qwen) is None and await budget_of(qwen, max_thinking_tokens=500) is None
    assert await budget_of(qwen, reasoning_effort="none", max_thinking_tokens=5) is None, (
        "the prompt ends its reasoning"
    )
    assert await budget_of(speaking(tokenizer), max_thinking_tokens=5) is None, "the model does not think"


async def test_begun_reasoning_counts_from_the_beginning(qwen: ModelContext) -> None:
    resumed = {"messages": [*HELLO, {"role": "assistant", "content": "<think>Hm"}], "continue_final_message": True,
               "add_generation_prompt": False}  # fmt: skip
    found = await budget_of(qwen, max_thinking_tokens=0, **resumed)
    assert found is not None and found.begun and found.tokens == 0


async def test_budget_of_harmony_ends_the_channel_and_forbids_another(tmp_path: Path) -> None:
    context = speaking(tokenizer_with(tmp_path, HARMONY, model_format.HARMONY))
    end, channel = ids(context, "<|end|>", "<|channel|>")
    found = await budget_of(context, max_thinking_tokens=7)
    assert found is not None and found.blanks is None and not found.begun
    assert found.opening == ids(context, "<|channel|>", "analysis", "<|message|>")
    assert found.forced == (end, *ids(context, "<|start|>", "assistant"), channel)
    assert found.forbidden == ((channel, ids(context, "analysis")[0]),)


async def test_budget_that_cannot_be_enforced_is_refused(qwen: ModelContext, tmp_path: Path) -> None:
    lacking = speaking(Tokenizer.load(save(byte_level(), tmp_path, tokenizer_config={"chat_template": QWEN3})))
    with pytest.raises(Unprocessable, match="no token </think>") as refused:
        await budget_of(lacking, messages, thinking={"type": "enabled", "budget_tokens": 20})
    assert refused.value.param == "thinking.budget_tokens"
    with pytest.raises(Unprocessable, match="differ"):
        await budget_of(qwen, max_thinking_tokens=3, reasoning={"max_tokens": 4})
    with pytest.raises(Unprocessable, match="allowed_token_ids"):
        await budget_of(qwen, max_thinking_tokens=3, allowed_token_ids=[5])
