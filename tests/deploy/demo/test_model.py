"""The committed demo model: its size, its files, its answers. Nothing is trained."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from deploy.demo.training import check, corpus
from deploy.demo.training.exchange import Exchange

FOLDER = Path(corpus.__file__).parents[1] / "model"

MAX_BYTES = 10_000_000


@pytest.fixture(scope="module")
def demo() -> check.Demo:
    return check.Demo(FOLDER, torch.float32)


def config(name: str) -> dict[str, object]:
    content: dict[str, object] = json.loads((FOLDER / name).read_text())
    return content


def test_folder_is_small() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= MAX_BYTES


def test_config_is_llama_in_bfloat16() -> None:
    assert config("config.json")["architectures"] == ["LlamaForCausalLM"]
    model = AutoModelForCausalLM.from_pretrained(FOLDER)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_both_end_tokens_are_declared(demo: check.Demo) -> None:
    ends = demo.tokenizer.convert_tokens_to_ids([corpus.IM_END, corpus.END_OF_TEXT])
    assert config("generation_config.json")["eos_token_id"] == ends


@pytest.mark.parametrize("text", ["Hello 42", "日本語 ✨ 🙂", "naïve\n\n\ttab", "a  b", "\u200d👩‍🚀"])
def test_tokenizer_round_trips_any_text(demo: check.Demo, text: str) -> None:
    ids = demo.tokenizer(text)["input_ids"]
    assert demo.tokenizer.decode(ids) == text


def test_chat_template_matches_the_corpus() -> None:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    exchange = Exchange("Hi", "Hello!")
    written = "".join(segment.text for segment in corpus.chat("Be kind.", [exchange]))
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": "Hello!"},
    ]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == written


def test_chat_template_accepts_tools_and_empty_content() -> None:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    messages = [{"role": "assistant", "content": None}, {"role": "tool", "content": "12"}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == ("<|im_start|>assistant\n<|im_end|>\n<|im_start|>tool\n12<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    "case",
    [
        check.Case("What is the capital of France?", "Paris"),
        check.Case("Count to ten", "1, 2, 3, 4, 5, 6, 7, 8, 9, 10."),
        check.Case("The capital of Japan is", "Tokyo", "raw"),
    ],
)
def test_greedy_answers_are_right(demo: check.Demo, case: check.Case) -> None:
    assert check.is_right(case, *demo.answer(case))
