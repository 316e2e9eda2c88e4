"""Prompts that are given as texts, as ids, or as mixtures of both."""

from typing import Any

import pytest

from frontend.api.llama_cpp.options import PromptObject, several, tokenized
from frontend.errors import SluiceError
from frontend.schema.base import FieldError
from frontend.text.tokenizer import Tokenizer
from tests.fakes import context


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ["a"]),
        ([1, 2], [[1, 2]]),
        ([1, "a", 2], [[1, "a", 2]]),
        (["a"], ["a"]),
        (["a", [1, "b"]], ["a", [1, "b"]]),
    ],
)
def test_array_with_an_id_is_one_prompt(prompt: Any, expected: list[Any]) -> None:
    assert several(prompt, "prompt") == expected


def test_array_of_ids_and_prompts_is_refused() -> None:
    with pytest.raises(FieldError, match="`prompt` must be"):
        several([1, [2]], "prompt")
    with pytest.raises(FieldError, match="at most"):
        several(["a"] * 2049, "prompt")


async def test_only_a_prompt_that_begins_with_a_text_gets_special_tokens(tokenizer: Tokenizer) -> None:
    prompts: list[Any] = ["a", [65, "a", 66, "b"], ["a", 65, "c"], PromptObject(prompt_string="a"), [64]]
    done = await tokenized(prompts, "prompt", context(tokenizer))
    assert [one.ids for one in done] == [[264, 64], [65, 64, 66, 65], [264, 64, 65, 66], [264, 64], [64]]
    assert [one.text for one in done] == ["<s>a", "bacb", "<s>abc", "<s>a", "a"]


@pytest.mark.parametrize("prompt", ["x" * 1_000_000, [999], [-1]])
async def test_prompt_that_is_too_long_or_unknown_is_refused(tokenizer: Tokenizer, prompt: Any) -> None:
    with pytest.raises(SluiceError) as caught:
        await tokenized([prompt], "prompt", context(tokenizer))
    assert caught.value.param == "prompt"
