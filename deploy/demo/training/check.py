"""Asks a demo model the questions of check.toml and prints how many it answers right.

    python -m deploy.demo.training.check deploy/demo/model --dtype float32

A prompt is asked as a chat or, if its kind is "raw", continued as plain text. An answer is right if it contains the
expected text, ignoring case, and ends by itself.
"""

import argparse
import tomllib
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

MAX_NEW_TOKENS = 260  # every answer, including stories, is much shorter


class Case(NamedTuple):
    prompt: str
    expected: str
    kind: str = "chat"


_QUESTIONS: dict[str, list[list[str]]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
CASES = tuple(
    Case(prompt, expected, "raw" if group == "raw" else "chat")
    for group, questions in _QUESTIONS.items()
    for prompt, expected in questions
)


class Demo:
    """A loaded model that answers one prompt at a time."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)

    def answer(self, case: Case, temperature: float = 0.0) -> tuple[str, bool]:
        """Returns the text after the prompt, and whether it ended within MAX_NEW_TOKENS."""
        text = case.prompt
        if case.kind == "chat":
            messages = [{"role": "user", "content": case.prompt}]
            text = str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        return self.complete(text, temperature)

    def complete(self, text: str, temperature: float = 0.0) -> tuple[str, bool]:
        inputs = self.tokenizer(text, return_tensors="pt", return_token_type_ids=False)
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {}
        with torch.inference_mode():
            output = self.model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, **sampling)
        new = output[0][inputs["input_ids"].shape[1] :]
        return str(self.tokenizer.decode(new, skip_special_tokens=True)), len(new) < MAX_NEW_TOKENS


def is_right(case: Case, answer: str, ended: bool) -> bool:
    whole = case.prompt + answer if case.prompt.startswith("Once") else answer
    return ended and case.expected.lower() in whole.lower()


def score(demo: Demo, temperature: float, verbose: bool) -> int:
    right = 0
    for case in CASES:
        answer, ended = demo.answer(case, temperature)
        correct = is_right(case, answer, ended)
        right += correct
        if verbose or not correct:
            print(f"{'ok ' if correct else 'BAD'} {case.kind:4} {case.prompt!r} -> {answer!r}")
    return right


def main() -> None:
    parser = argparse.ArgumentParser(description="Score a demo model on a list of questions.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verbose", action="store_true", help="print right answers too")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    demo = Demo(args.folder, getattr(torch, args.dtype))
    right = score(demo, args.temperature, args.verbose)
    print(f"{right} of {len(CASES)} right ({100 * right / len(CASES):.1f} %)")


if __name__ == "__main__":
    main()
