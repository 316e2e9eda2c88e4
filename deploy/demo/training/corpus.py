"""The training text: an endless, seeded stream of chats and plain documents.

A document is a list of segments. A segment's `learn` flag says whether the model learns to write it or only reads it.
Knows no tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import TypeAlias

from deploy.demo.training import facts
from deploy.demo.training.exchange import Exchange, lower_first, upper_first
from deploy.demo.training.questions import capital_answer, capital_of, country, draw, is_in, language_of, tale

IM_START, IM_END, END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"


@dataclass(frozen=True)
class Segment:
    text: str
    learn: bool


Document: TypeAlias = tuple[Segment, ...]


# Only a question that begins with a word of ASKING, or a command that begins with a word of TELLING, is put into a
# frame such as "Tell me: …".
ASKING = (
    "What", "What's", "Which", "Where", "When", "Who", "Why", "How", "Is", "Are", "Do", "Does", "On", "In",
    "At", "Of",
)  # fmt: skip
TELLING = (
    "Count", "Tell", "Name", "Write", "List", "Say", "Give", "Spell", "Explain", "Define", "Describe", "Add",
    "Calculate", "Compute", "Repeat", "Make",
)  # fmt: skip
ASKING_FRAMES = (
    "Please tell me: {}", "Can you tell me {}", "Could you tell me, {}", "Hi, {}", "Hey, {}", "Hello, {}",
    "I have a question: {}", "Tell me, {}", "Quick question: {}", "So {}", "Please, {}", "And {}",
    "I forgot, {}", "Do you know {}", "Hello Sluice, {}", "I would like to know: {}", "Okay, {}",
    "Can you please tell me {}", "Hey there, could you please tell me {}", "I wonder, {}", "Now {}",
)  # fmt: skip
WHAT_IS_FRAMES = (
    "Can you tell me what {} is?", "Do you know what {} is?", "I want to know what {} is.",
    "Please tell me what {} is.", "Tell me what {} is", "Could you please tell me what {} is?",
    "Hey, can you tell me what {} is?", "I would like to know what {} is.", "{}, please?", "{}?",
    "Do you happen to know what {} is?", "I need to know {}.",
)  # fmt: skip
TELLING_FRAMES = (
    "Please {}", "Can you {}", "Could you {}", "Could you please {}", "Can you please {}", "Now {}",
    "I want you to {}", "Would you {}", "Hey, {}", "Hello, please {}", "Hi! Can you {}", "Okay, {}",
    "I would like you to {}", "Will you {}",
)  # fmt: skip
SUFFIXES = ("{}, please{}", "{} please", "{}{} Thanks!", "{}{} Thank you.", "{} for me{}", "{}{} Be brief.",
            "{}{} Answer in one sentence.", "{}, thanks{}")  # fmt: skip
PREFACES = (
    "Hello! {}", "Hi there. {}", "I am doing my homework. {}", "I have a question. {}", "Let me ask you this. {}",
    "Here is a question for you. {}", "I need your help. {}", "Good morning! {}", "Thanks! {}", "Great. {}",
)  # fmt: skip


def casual(rng: Random, question: str) -> str:
    """Rewrites the question as people type: with another opening, in another case, or without punctuation."""
    text = _wrap(rng, question) if rng.random() < 0.3 else question
    roll = rng.random()
    if roll < 0.18:
        text = text.rstrip("?.!")
    if 0.1 < roll < 0.35:
        text = text.lower()
    elif roll > 0.98:
        text = text.upper()
    return text


def _wrap(rng: Random, text: str) -> str:
    opener = text.split()[0]
    if opener not in ASKING and opener not in TELLING:
        return text
    roll = rng.random()
    if roll < 0.15:
        return rng.choice(PREFACES).format(text)
    if roll < 0.4:
        mark = text[-1] if text[-1] in "?.!" else ""
        return rng.choice(SUFFIXES).format(text.rstrip("?.!"), mark)
    if opener in TELLING:
        return upper_first(rng.choice(TELLING_FRAMES).format(lower_first(text)))
    if text.startswith("What is the ") and text.endswith("?") and rng.random() < 0.5:
        subject = text.removeprefix("What is ").removesuffix("?")
        return upper_first(rng.choice(WHAT_IS_FRAMES).format(subject))
    return rng.choice(ASKING_FRAMES).format(lower_first(text))


def chat(system: str, exchanges: list[Exchange]) -> Document:
    """Formats a chat in ChatML, exactly like the tokenizer's chat template."""
    segments = []
    if system:
        segments.append(Segment(f"{IM_START}system\n{system}{IM_END}\n", learn=False))
    for question, answer in exchanges:
        prompt = f"{IM_START}user\n{question}{IM_END}\n{IM_START}assistant\n"
        segments.append(Segment(prompt, learn=False))
        segments.append(Segment(answer + IM_END, learn=True))
        segments.append(Segment("\n", learn=False))
    return tuple(segments)


def _system(rng: Random) -> str:
    return rng.choice(facts.SYSTEM_PROMPTS) if rng.random() < 0.35 else ""


def one_turn(rng: Random) -> Document:
    question, answer = draw(rng)
    return chat(_system(rng), [Exchange(casual(rng, question), answer)])


def _introduction(rng: Random) -> tuple[Exchange, Exchange]:
    name = rng.choice(facts.NAMES_HE + facts.NAMES_SHE)
    said = rng.choice(("My name is {}.", "I am {}.", "Hello, my name is {}.", "Hi, I'm {}.", "Call me {}."))
    asked = rng.choice(("What is my name?", "Do you remember my name?", "Who am I?", "What's my name?"))
    return (
        Exchange(casual(rng, said.format(name)), f"Nice to meet you, {name}!"),
        Exchange(casual(rng, asked), f"Your name is {name}."),
    )


def _follow_up(rng: Random) -> tuple[Exchange, Exchange]:
    """Returns a question about a country, and a follow-up about another country: "And Spain?"."""
    row = country(rng)
    template = rng.choice(("And {}?", "What about {}?", "And of {}?", "How about {}?", "And what about {}?"))
    question = casual(rng, template.format(row.name))
    if row.language and rng.random() < 0.3:
        return language_of(rng), Exchange(question, f"People in {row.name} speak {row.language}.")
    return capital_of(rng), Exchange(question, capital_answer(row))


def dialogue(rng: Random, turns: int) -> Document:
    exchanges: list[Exchange] = []
    pending: list[Exchange] = []  # questions about an earlier exchange
    while len(exchanges) < turns:
        roll = rng.random()
        if pending and roll < 0.4:
            exchanges.append(pending.pop())
        elif roll < 0.5 and not pending and not exchanges:
            first, later = _introduction(rng)
            exchanges.append(first)
            pending.append(later)
        elif roll < 0.65:
            exchanges.extend(_follow_up(rng))
        else:
            question, answer = draw(rng, exclude=tale if turns > 8 and roll < 0.95 else None)
            exchanges.append(Exchange(casual(rng, question), answer))
    return chat(_system(rng), exchanges)


def _about_country(rng: Random) -> str:
    row = country(rng)
    return capital_answer(row) if rng.random() < 0.5 else f"{capital_answer(row)} {is_in(row)}"


def _about_things(rng: Random) -> str:
    """Returns the answer to a random question, chosen so that it makes sense as a statement alone."""
    while True:
        answer = draw(rng, exclude=tale).answer
        if answer[-1] == "." and not answer.startswith(("Yes", "No", "I ")) and "I am" not in answer:
            return answer


def _numbers(rng: Random) -> str:
    last = rng.choice((10, 10, 12, 15, 20, 20))
    if rng.random() < 0.5:
        return ", ".join(map(str, range(1, last + 1))) + "."
    words = ", ".join(facts.NUMBER_WORDS[1 : last + 1]) + "."
    return upper_first(words) if rng.random() < 0.5 else words


def _lists(rng: Random) -> str:
    row = rng.choice((facts.DAYS, facts.MONTHS, facts.PLANETS, tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ")))
    return ", ".join(row) + "."


def plain(rng: Random) -> Document:
    """Returns text without chat markup. The model learns to write all of it, so that it can continue raw prompts."""
    roll = rng.random()
    if roll < 0.15:
        text = tale(rng).answer
    elif roll < 0.45:
        text = _about_country(rng)
    elif roll < 0.6:
        text = _numbers(rng)
    elif roll < 0.65:
        text = _lists(rng)
    else:
        text = " ".join(_about_things(rng) for _ in range(rng.choice((1, 1, 1, 2, 2))))
    return (Segment(text + END_OF_TEXT, learn=True),)


def questionnaire(rng: Random) -> Document:
    """Returns questions and answers as plain text: "Q: ... A: ...", or bare questions and answers."""
    before, between = rng.choice(
        (("Q: ", "\nA: "), ("Q: ", "\nA: "), ("Question: ", "\nAnswer: "), ("User: ", "\nAssistant: "),
         ("", "\n"), ("", "\n"), ("", " "))
    )  # fmt: skip
    segments: list[Segment] = []
    while not segments or rng.random() < 0.25:
        question, answer = draw(rng)
        gap = "\n\n" if segments else ""
        if not before and question[-1] not in "?.!":
            continue
        # The space after "A:" belongs to the answer, so that a prompt may end at the colon.
        asked = casual(rng, question) if before else question
        segments.append(Segment(f"{gap}{before}{asked}", learn=False))
        segments.append(Segment(f"{between}{answer}", learn=True))
    return (*segments, Segment(END_OF_TEXT, learn=True))


def document(rng: Random) -> Document:
    """Returns a short document, usually well under 300 tokens."""
    roll = rng.random()
    if roll < 0.5:
        return one_turn(rng)
    if roll < 0.67:
        return dialogue(rng, rng.choice((2, 2, 3, 4)))
    if roll < 0.83:
        return plain(rng)
    return questionnaire(rng)


def documents(seed: int) -> Iterator[Document]:
    """Yields documents for ever; the same seed gives the same documents."""
    rng = Random(seed)
    while True:
        yield document(rng)


def long_documents(seed: int) -> Iterator[Document]:
    """Yields only long dialogues, of about 500 tokens and more."""
    rng = Random(seed)
    while True:
        yield dialogue(rng, rng.randint(14, 40))
