"""A small story grammar: a hero, a place, a plot, an ending. Its words are in stories.toml."""

import tomllib
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from deploy.demo.training.facts import NAMES_HE, NAMES_SHE


class Theme(NamedTuple):
    topics: tuple[str, ...]
    body: tuple[str, ...]
    ending: str


_WORDS: dict[str, Any] = tomllib.loads((Path(__file__).parent / "stories.toml").read_text(encoding="utf-8"))
THEMES = tuple(Theme(tuple(row["topics"]), tuple(row["body"]), row["ending"]) for row in _WORDS["themes"])
ANIMALS, GIRLS, BOYS, PEOPLE, SIZES, PLACES, FRIENDS, THINGS, FOODS = (
    tuple(str(word) for word in _WORDS[name])
    for name in ("animals", "girls", "boys", "people", "sizes", "places", "friends", "things", "foods")
)


def _slots(rng: Random, kind: str, name: str, she: bool) -> dict[str, str]:
    return {
        "kind": kind,
        "name": name,
        "he": "she" if she else "he",
        "He": "She" if she else "He",
        "his": "her" if she else "his",
        "His": "Her" if she else "His",
        "friend": rng.choice([friend for friend in FRIENDS if friend != kind]),
        "thing": rng.choice(THINGS),
        "food": rng.choice(FOODS),
        "size": rng.choice(SIZES),
        "place": rng.choice(PLACES),
    }


def _hero(rng: Random) -> tuple[str, str, bool]:
    """Draws a hero: the kind, the name, and whether the pronoun is "she"."""
    kind = rng.choice(rng.choice((ANIMALS, ANIMALS, GIRLS, BOYS, PEOPLE)))
    she = kind in GIRLS or (kind not in BOYS and rng.random() < 0.5)
    return kind, rng.choice(NAMES_SHE if she else NAMES_HE), she


def article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeio" else f"a {noun}"


def _requests(slots: dict[str, str], theme: Theme) -> tuple[str, ...]:
    kind, name = article(slots["kind"]), slots["name"]
    place = slots["place"]
    return (
        "",
        kind,
        kind,
        f"{kind} named {name}",
        f"{kind} called {name}",
        name,
        f"{article(slots['size'] + ' ' + slots['kind'])}",
        f"{kind} and {article(slots['friend'])}",
        f"{kind} in {place}",
        place,
        *(topic.format_map(slots) for topic in theme.topics[:3]),
    )


def _wording(rng: Random, about: str) -> str:
    ask = rng.choice(
        ("Tell me a story", "Tell me a story", "Write a story", "Write a short story", "Tell a story",
         "Tell me a short story", "Write me a story", "Tell me a bedtime story", "I want a story",
         "Make up a story", "Give me a story", "Can you tell me a story", "Write a little story",
         "Please tell me a story", "Could you write a short story", "Tell me a tale")
    )  # fmt: skip
    return f"{ask} about {about}" if about else ask


def story(rng: Random) -> tuple[str, str]:
    """Returns a request for a story, without its full stop, and the story that answers it."""
    theme = rng.choice(THEMES)
    slots = _slots(rng, *_hero(rng))
    verb = rng.choice(("named", "called", "named"))
    hero = article(f"{slots['size']} {slots['kind']}")
    opening = f"Once upon a time, there was {hero} {verb} {{name}} who lived in {{place}}."
    first, *others = theme.body
    text = "\n\n".join((f"{opening} {first}", *others[:-1], f"{others[-1]} {theme.ending}"))
    return _wording(rng, rng.choice(_requests(slots, theme))), text.format_map(slots)
