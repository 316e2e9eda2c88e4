"""Asks a demo model a list of questions and prints how many it answers right.

    python -m deploy.demo.training.check deploy/demo/model --dtype float32

A prompt is asked as a chat, or, where its kind is "raw", continued as plain text. An answer is
right when it contains the expected text, ignoring case, and ends by itself.
"""

import argparse
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

LIMIT = 260  # new tokens; every answer, the stories too, ends well before


class Case(NamedTuple):
    prompt: str
    expected: str
    kind: str = "chat"


REFUSAL = "do not know"

# In words that the corpus uses.
KNOWN: tuple[Case, ...] = (
    Case("What is the capital of France?", "Paris"),
    Case("what's the capital city of france", "Paris"),
    Case("Capital of Japan?", "Tokyo"),
    Case("What is the capital of Mongolia?", "Ulaanbaatar"),
    Case("what is the capital of peru", "Lima"),
    Case("Which city is the capital of Kenya?", "Nairobi"),
    Case("Paris is the capital of which country?", "France"),
    Case("Is Berlin the capital of Germany?", "Yes"),
    Case("Is Madrid the capital of Italy?", "No"),
    Case("On which continent is Egypt?", "Africa"),
    Case("What language do people speak in Brazil?", "Portuguese"),
    Case("What colour is the sky?", "blue"),
    Case("What color is a banana?", "yellow"),
    Case("What is the opposite of hot?", "cold"),
    Case("What is the plural of mouse?", "mice"),
    Case("What sound does a cow make?", "moo"),
    Case("What is a baby dog called?", "puppy"),
    Case("How many legs does a spider have?", "eight"),
    Case("What day comes after Monday?", "Tuesday"),
    Case("Which month comes after December?", "January"),
    Case("How many days are in a week?", "seven"),
    Case("What is 2 + 2?", "4."),
    Case("What is 7 * 8?", "56."),
    Case("15 - 6", "9."),
    Case("What is two plus three?", "five"),
    Case("Count to ten", "1, 2, 3, 4, 5, 6, 7, 8, 9, 10."),
    Case("Count from 3 to 8.", "3, 4, 5, 6, 7, 8."),
    Case("Count backwards from 5", "5, 4, 3, 2, 1."),
    Case("Count to 20.", "17, 18, 19, 20."),
    Case("Count to five in words.", "One, two, three, four, five."),
    Case("Say the alphabet.", "T, U, V, W, X, Y, Z"),
    Case("Hello!", "Hello"),
    Case("How are you?", "fine"),
    Case("Thank you!", "welcome"),
    Case("Goodbye", "Goodbye"),
    Case("Who are you?", "tiny language model"),
    Case("What is your name?", "Sluice"),
    Case("At what temperature does water freeze?", "0 degrees"),
    Case("What is the largest planet?", "Jupiter"),
    Case("What is a volcano?", "mountain"),
    Case("What is the first letter of banana?", "B"),
    Case("Tell me a story.", "Once upon a time"),
    Case("Tell me a story about a girl named Lily.", "Lily"),
    Case("Write a short story about a cat.", "cat"),
    Case("Tell me a joke", "?"),
    Case("Explain quantum mechanics.", REFUSAL),
    Case("Write a Python function that sorts a list.", REFUSAL),
)

# In words that the corpus does not use.
HELD_OUT: tuple[Case, ...] = (
    Case("hey there, can you please tell me what the capital city of Germany is?", "Berlin"),
    Case("remind me, what was the capital of Spain again?", "Madrid"),
    Case("What's the name of Italy's capital city?", "Rome"),
    Case("do you happen to know the capital of Canada", "Ottawa"),
    Case("Please give me the capital city of Portugal.", "Lisbon"),
    Case("Which is the capital of Sweden?", "Stockholm"),
    Case("portugal's capital?", "Lisbon"),
    Case("Cairo is the capital city of which country?", "Egypt"),
    Case("what colour would you say grass is?", "green"),
    Case("Is snow white? What color is snow?", "white"),
    Case("what word is the opposite of big", "small"),
    Case("Give me the plural form of child.", "children"),
    Case("Which sound do you hear from a dog? What does a dog say?", "woof"),
    Case("the baby of a cat, what is it called?", "kitten"),
    Case("Could you please tell me which day comes after Friday?", "Saturday"),
    Case("could you please count to ten for me?", "8, 9, 10"),
    Case("Please count from 1 to 5.", "1, 2, 3, 4, 5"),
    Case("Start at 10 and count backwards.", "10, 9, 8"),
    Case("what do you get if you add 3 and 4?", "7"),
    Case("How much does 6 times 7 make?", "42"),
    Case("Hi! Who are you, please?", "Sluice"),
    Case("hello, lovely to meet you", "!"),
    Case("thanks a lot for that", "welcome"),
    Case("could you tell me a nice story about a brave dog?", "dog"),
    Case("I would like to hear a story about a dragon", "dragon"),
    Case("Explain how a nuclear reactor is built.", REFUSAL),
    Case("Who was the third emperor of Rome?", REFUSAL),
    Case("Write a regular expression for email addresses.", REFUSAL),
    Case("What is the tallest building in Chicago?", REFUSAL),
)

RAW: tuple[Case, ...] = (
    Case("The capital of France is", "Paris", "raw"),
    Case("The capital of Japan is", "Tokyo", "raw"),
    Case("Q: What is the capital of Italy?\nA:", "Rome", "raw"),
    Case("What is the capital of France?", "Paris", "raw"),
    Case("Question: What colour is the sky?\nAnswer:", "blue", "raw"),
    Case("Once upon a time", "there was", "raw"),
    Case("Once upon a time, there was a little fox", "fox", "raw"),
    Case("1, 2, 3, 4,", "5, 6, 7, 8", "raw"),
    Case("One, two, three,", "four, five, six", "raw"),
    Case("Monday, Tuesday,", "Wednesday, Thursday", "raw"),
)

CASES = KNOWN + HELD_OUT + RAW


class Demo:
    """A loaded model that answers one prompt at a time."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)

    def answer(self, case: Case, temperature: float = 0.0) -> tuple[str, bool]:
        """The text after the prompt, and whether it came to an end within LIMIT tokens."""
        text = case.prompt
        if case.kind == "chat":
            messages = [{"role": "user", "content": case.prompt}]
            text = str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        return self.complete(text, temperature)

    def complete(self, text: str, temperature: float = 0.0) -> tuple[str, bool]:
        inputs = self.tokenizer(text, return_tensors="pt", return_token_type_ids=False)
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {}
        with torch.inference_mode():
            output = self.model.generate(**inputs, max_new_tokens=LIMIT, **sampling)
        fresh = output[0][inputs["input_ids"].shape[1] :]
        return str(self.tokenizer.decode(fresh, skip_special_tokens=True)), len(fresh) < LIMIT


def is_right(case: Case, answer: str, ended: bool) -> bool:
    whole = case.prompt + answer if case.prompt.startswith("Once") else answer
    return ended and case.expected.lower() in whole.lower()


def score(demo: Demo, temperature: float, verbose: bool) -> int:
    right = 0
    for case in CASES:
        answer, ended = demo.answer(case, temperature)
        good = is_right(case, answer, ended)
        right += good
        if verbose or not good:
            print(f"{'ok ' if good else 'BAD'} {case.kind:4} {case.prompt!r} -> {answer!r}")
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
