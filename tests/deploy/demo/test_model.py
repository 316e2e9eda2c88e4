"""The committed demo model: its size, its files, its answers. Nothing is trained."""

import json
import tomllib
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

FOLDER = Path(__file__).parents[3] / "deploy" / "demo" / "model"
QUESTIONS = tomllib.loads((FOLDER.parents[2] / "bench" / "micro" / "demo_questions.toml").read_text(encoding="utf-8"))

MAX_BYTES = 10_000_000
MAX_NEW_TOKENS = 260  # every answer is much shorter


class Demo:
    """The loaded model, which answers one prompt at a time as `transformers` runs it."""

    def __init__(self) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(FOLDER)
        self.model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)

    def answer(self, prompt: str, raw: bool) -> str:
        messages = [{"role": "user", "content": prompt}]
        chat = (
            prompt if raw else self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        )
        inputs = self.tokenizer(chat, return_tensors="pt", return_token_type_ids=False)
        with torch.inference_mode():
            output = self.model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
        new = output[0][inputs["input_ids"].shape[1] :]
        assert len(new) < MAX_NEW_TOKENS, "the answer does not end"
        return str(self.tokenizer.decode(new, skip_special_tokens=True))


@pytest.fixture(scope="module")
def demo() -> Demo:
    return Demo()


def config(name: str) -> dict[str, object]:
    content: dict[str, object] = json.loads((FOLDER / name).read_text())
    return content


def test_folder_is_small() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= MAX_BYTES


def test_config_is_llama_in_bfloat16() -> None:
    assert config("config.json")["architectures"] == ["LlamaForCausalLM"]
    model = AutoModelForCausalLM.from_pretrained(FOLDER)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_both_end_tokens_are_declared(demo: Demo) -> None:
    ends = demo.tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert config("generation_config.json")["eos_token_id"] == ends


@pytest.mark.parametrize("text", ["Hello 42", "日本語 ✨ 🙂", "naïve\n\n\ttab", "a  b", "\u200d👩‍🚀"])
def test_tokenizer_round_trips_any_text(demo: Demo, text: str) -> None:
    ids = demo.tokenizer(text)["input_ids"]
    assert demo.tokenizer.decode(ids) == text


def test_chat_template_writes_the_training_format() -> None:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": "Hello!"},
    ]
    turns = (("system", "Be kind."), ("user", "Hi"), ("assistant", "Hello!"))
    written = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)
    assert tokenizer.apply_chat_template(messages, tokenize=False) == written


def test_chat_template_accepts_tools_and_empty_content() -> None:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    messages = [{"role": "assistant", "content": None}, {"role": "tool", "content": "12"}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == ("<|im_start|>assistant\n<|im_end|>\n<|im_start|>tool\n12<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("group", "prompt"),
    [("known", "What is the capital of France?"), ("known", "Capital of Japan?"), ("raw", "The capital of Japan is")],
)
def test_greedy_answers_are_right(demo: Demo, group: str, prompt: str) -> None:
    expected = dict(QUESTIONS[group])[prompt]
    assert expected.lower() in demo.answer(prompt, raw=group == "raw").lower()
