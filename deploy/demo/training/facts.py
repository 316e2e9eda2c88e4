"""Reads facts.toml: the tables of facts that the demo model is taught.

Holds no logic; `questions` turns the rows into questions and answers.
"""

import tomllib
from pathlib import Path
from typing import Any, NamedTuple


class Country(NamedTuple):
    name: str
    capital: str
    continent: str
    language: str = ""  # the country's language; empty if the model does not learn it


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


_FACTS: dict[str, Any] = tomllib.loads((Path(__file__).parent / "facts.toml").read_text(encoding="utf-8"))
_ROWS: dict[str, Any] = {name: _as_tuples(rows) for name, rows in _FACTS.items()}

COUNTRIES: tuple[Country, ...] = tuple(Country(*row) for row in _ROWS["countries"])
FAMOUS: tuple[str, ...] = _ROWS["famous"]
COLOURS: tuple[tuple[str, str, str], ...] = _ROWS["colours"]
OPPOSITES: tuple[tuple[str, str], ...] = _ROWS["opposites"]
ONE_WAY_OPPOSITES: tuple[tuple[str, str], ...] = _ROWS["one_way_opposites"]
PLURALS: tuple[tuple[str, str], ...] = _ROWS["plurals"]
PAST_TENSES: tuple[tuple[str, str], ...] = _ROWS["past_tenses"]
ANIMAL_SOUNDS: tuple[tuple[str, str], ...] = _ROWS["animal_sounds"]
BABY_ANIMALS: tuple[tuple[str, str], ...] = _ROWS["baby_animals"]
ANIMAL_HOMES: tuple[tuple[str, str], ...] = _ROWS["animal_homes"]
ANIMAL_FOOD: tuple[tuple[str, str], ...] = _ROWS["animal_food"]
LEG_COUNTS: tuple[tuple[str, str], ...] = _ROWS["leg_counts"]
ABILITIES: tuple[tuple[str, str, bool], ...] = _ROWS["abilities"]
DAYS: tuple[str, ...] = _ROWS["days"]
MONTHS: tuple[str, ...] = _ROWS["months"]
MONTH_DAYS: tuple[str, ...] = _ROWS["month_days"]
SEASONS: tuple[str, ...] = _ROWS["seasons"]
PLANETS: tuple[str, ...] = _ROWS["planets"]
ORDINALS: tuple[str, ...] = _ROWS["ordinals"]
NUMBER_WORDS: tuple[str, ...] = _ROWS["number_words"]
DEFINITIONS: tuple[tuple[str, str], ...] = _ROWS["definitions"]
JOKES: tuple[str, ...] = _ROWS["jokes"]
POEMS: tuple[tuple[str, str], ...] = _ROWS["poems"]
NAMES_SHE: tuple[str, ...] = _ROWS["names_she"]
NAMES_HE: tuple[str, ...] = _ROWS["names_he"]
UNKNOWN_TOPICS: tuple[str, ...] = _ROWS["unknown_topics"]
UNKNOWN_QUESTIONS: tuple[str, ...] = _ROWS["unknown_questions"]
SYSTEM_PROMPTS: tuple[str, ...] = _ROWS["system_prompts"]
SPELLING_WORDS: tuple[str, ...] = _ROWS["spelling_words"]
FUN_FACTS: tuple[str, ...] = _ROWS["fun_facts"]
CATEGORIES: tuple[tuple[str, tuple[str, ...]], ...] = _ROWS["categories"]
GIBBERISH: tuple[str, ...] = _ROWS["gibberish"]
SCIENCE: tuple[tuple[tuple[str, ...], str], ...] = tuple(
    (_as_tuples(row["questions"]), row["answer"]) for row in _FACTS["science"]
)
SMALL_TALK: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = tuple(
    (_as_tuples(row["phrasings"]), _as_tuples(row["answers"])) for row in _FACTS["small_talk"]
)
