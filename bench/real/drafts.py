"""Measures drafts on a real model's answers: `python -m bench.real.drafts [--new 160] [--rounds 3] [--sequences 1,8]`.

Each task is answered with and without drafts in turns, in one process and thread, as in bench/micro/drafts.py. The
tasks are summaries of prose, functions rewritten with one change, lists, and stories, which repeat no prompt text.
"""

import argparse
import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from functools import cache

import torch
from tokenizers import Tokenizer

from bench.checkpoints import cache_folder
from bench.micro.drafts import Text, compare
from bench.real.text import packaged_text
from deploy.launcher.packaged_model import SMOLLM2, fetched
from shared.config.settings import ModelConfig
from shared.config.worker import WorkerConfig
from shared.gguf.translated import translated
from worker.engine.build import load_engine

EACH = 8  # number of requests per task
TEMPERATURES = (0.0, 0.2)  # the model's authors recommend 0.2
SUBJECTS = ("fruits", "countries of Europe", "programming languages", "animals of the forest", "musical instruments",
            "planets and moons", "things to pack for a journey", "tools of a carpenter")  # fmt: skip
HEROES = ("a fox", "an old king", "two sisters", "a robot", "a fisherman", "a teacher", "a lost dog", "a young pilot")
FUNCTIONS: tuple[Callable[..., object], ...] = (
    textwrap.dedent, textwrap.indent, textwrap.shorten, inspect.cleandoc, inspect.getmodulename,
    ast.literal_eval, ast.get_docstring, ast.walk,
)  # fmt: skip


def tasks() -> Iterator[tuple[str, list[str]]]:
    """Yields the name of each task and the questions of its requests."""
    passages = _passages(EACH)
    yield "summary", [f"Summarize this text in three sentences:\n\n{passage}" for passage in passages]
    yield "edit of code", [f"Add type hints and write the whole function again:\n\n{code}" for code in _sources()]
    yield "list", [f"Write a numbered list of twenty {subject}, each with one sentence." for subject in SUBJECTS]
    yield "story", [f"Tell a story about {hero} who found a key." for hero in HEROES]


def _passages(count: int) -> list[str]:
    root = cache_folder() / "real"
    root.mkdir(parents=True, exist_ok=True)
    paragraphs = [part for part in packaged_text(root).split("\n\n") if 600 < len(part) < 1500]
    return paragraphs[:count]


def _sources() -> list[str]:
    return [textwrap.dedent(inspect.getsource(function))[:1500] for function in FUNCTIONS]


@cache
def _tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(translated([fetched(SMOLLM2)]) / "tokenizer.json"))


def _prompt(question: str) -> list[int]:
    """Returns the ids of a chat with one question, as the model's template writes it."""
    chat = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    return list(_tokenizer().encode(chat, add_special_tokens=False).ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", default="1,8")
    parser.add_argument("--new", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    engine = load_engine(ModelConfig(model=str(fetched(SMOLLM2))), WorkerConfig(device="cpu", kv_cache_gb=0.5))
    print("| text, sequences | tokens/s without | speedup with drafts | drafts per token | accepted |")
    print("|---|--:|--:|--:|--:|")
    for sequences in map(int, args.sequences.split(",")):
        for name, questions in tasks():
            for temperature in TEMPERATURES:
                text = Text(f"{name}, temperature {temperature:g}", temperature)
                prompts = [_prompt(question) for question in questions[:sequences]]
                print(compare(engine, text, prompts, args.new, args.rounds), flush=True)


if __name__ == "__main__":
    main()
