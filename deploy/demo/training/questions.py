"""Question families: each draws one question with its one right answer. `corpus` formats them."""

from collections.abc import Callable
from random import Random
from typing import TypeAlias

from deploy.demo.training import facts
from deploy.demo.training.exchange import WORDINGS, Exchange, lower_first, number, upper_first
from deploy.demo.training.facts import NUMBER_WORDS, Country
from deploy.demo.training.number_questions import (
    after_in_cycle,
    arithmetic,
    compare,
    counting,
    neighbour_letter,
    neighbour_number,
    nth_of_cycle,
    today_tomorrow,
)
from deploy.demo.training.stories import ANIMALS, article, story

Family: TypeAlias = Callable[[Random], Exchange]

REFUSAL = "I do not know that. I am a very small model."


def country(rng: Random) -> Country:
    if rng.random() < 0.25:
        wanted = rng.choice(facts.FAMOUS)
        return next(row for row in facts.COUNTRIES if row.name == wanted)
    return rng.choice(facts.COUNTRIES)


def capital_answer(row: Country) -> str:
    return f"The capital of {row.name} is {row.capital}".rstrip(".") + "."


def capital_of(rng: Random) -> Exchange:
    row = country(rng)
    name = row.name.removeprefix("the ") if rng.random() < 0.2 else row.name
    template = rng.choice(WORDINGS["capital_of"])
    return Exchange(upper_first(template.format(name)), capital_answer(row))


def country_of(rng: Random) -> Exchange:
    row = country(rng)
    if row.capital == "London":
        row = facts.COUNTRIES[0]
    template = rng.choice(WORDINGS["country_of"])
    return Exchange(template.format(row.capital), f"{row.capital} is the capital of {row.name}.")


def is_capital(rng: Random) -> Exchange:
    row = country(rng)
    claimed = row if rng.random() < 0.5 else country(rng)
    question = f"Is {claimed.capital} the capital of {row.name}?"
    verdict = "Yes" if claimed.capital == row.capital else "No"
    return Exchange(question, f"{verdict}, {lower_first(capital_answer(row))}")


def continent_of(rng: Random) -> Exchange:
    row = country(rng)
    template = rng.choice(WORDINGS["continent_of"])
    return Exchange(template.format(row.name), is_in(row))


def about_country(rng: Random) -> Exchange:
    row = country(rng)
    template = rng.choice(WORDINGS["about_country"])
    return Exchange(template.format(row.name), describe(row))


def describe(row: Country) -> str:
    sentences = [is_in(row), capital_answer(row)]
    if row.language:
        sentences.append(f"People in {row.name} speak {row.language}.")
    return " ".join(sentences)


def is_in(row: Country) -> str:
    verb = "are" if row.name in ("the Philippines", "the Maldives", "the Bahamas") else "is"
    return f"{upper_first(row.name)} {verb} in {row.continent}."


def language_of(rng: Random) -> Exchange:
    row = country(rng)
    while not row.language:
        row = country(rng)
    template = rng.choice(WORDINGS["language_of"])
    return Exchange(template.format(row.name), f"People in {row.name} speak {row.language}.")


def colour_of(rng: Random) -> Exchange:
    thing, verb, colour = rng.choice(facts.COLOURS)
    word = rng.choice(("colour", "color"))
    template = rng.choice(WORDINGS["colour_of"])
    question = template.format(word=word, verb=verb, thing=thing)
    if verb == "are":
        question = question.replace("does", "do")
    return Exchange(question, f"{upper_first(thing)} {verb} {colour}.")


def is_colour(rng: Random) -> Exchange:
    thing, verb, colour = rng.choice(facts.COLOURS)
    claimed = colour if rng.random() < 0.5 else rng.choice(facts.COLOURS)[2]
    verdict = "Yes" if claimed == colour else "No"
    return Exchange(f"{upper_first(verb)} {thing} {claimed}?", f"{verdict}, {thing} {verb} {colour}.")


def ability(rng: Random) -> Exchange:
    animal, action, able = rng.choice(facts.ABILITIES)
    answer = f"Yes, {animal} can {action}." if able else f"No, {animal} cannot {action}."
    return Exchange(f"Can {animal} {action}?", answer)


def naming(rng: Random) -> Exchange:
    category, members = rng.choice(facts.CATEGORIES)
    count = rng.randint(2, 5)
    template = rng.choice(WORDINGS["naming"])
    question = template.format(number(rng, count), category)
    return Exchange(question, f"{upper_first(', '.join(members[: count - 1]))} and {members[count - 1]}.")


def nonsense(rng: Random) -> Exchange:
    text = rng.choice(facts.GIBBERISH)
    if rng.random() < 0.5:
        letters = "abcdefghijklmnopqrstuvwxyz0123456789"
        words = ("".join(rng.choices(letters, k=rng.randint(2, 8))) for _ in range(rng.randint(1, 4)))
        text = " ".join(words)
    return Exchange(text, "I do not understand that. I am a very small model.")


def fun_fact(rng: Random) -> Exchange:
    question = rng.choice(WORDINGS["fun_fact"])
    return Exchange(question, rng.choice(facts.FUN_FACTS))


def opposite_of(rng: Random) -> Exchange:
    pairs = facts.OPPOSITES + facts.ONE_WAY_OPPOSITES
    index = rng.randrange(len(pairs))
    word, opposite = pairs[index]
    if index < len(facts.OPPOSITES) and rng.random() < 0.5:
        word, opposite = opposite, word
    template = rng.choice(WORDINGS["opposite_of"])
    return Exchange(template.format(word), f"The opposite of {word} is {opposite}.")


def word_form(rng: Random) -> Exchange:
    table, label = rng.choice(((facts.PLURALS, "plural"), (facts.PLURALS, "plural"), (facts.PAST_TENSES, "past tense")))
    word, form = rng.choice(table)
    template = rng.choice(WORDINGS["word_form"])
    return Exchange(upper_first(template.format(label, word)), f"The {label} of {word} is {form}.")


def animal_sound(rng: Random) -> Exchange:
    animal, sound = rng.choice(facts.ANIMAL_SOUNDS)
    template = rng.choice(WORDINGS["animal_sound"])
    what = article(animal) if rng.random() < 0.8 else f"the {animal}"
    return Exchange(template.format(what), f"{upper_first(article(animal))} says {sound}.")


def baby_animal(rng: Random) -> Exchange:
    animal, baby = rng.choice(facts.BABY_ANIMALS)
    template = rng.choice(WORDINGS["baby_animal"])
    return Exchange(template.format(animal, a=article(animal)), f"A baby {animal} is called {article(baby)}.")


def animal_life(rng: Random) -> Exchange:
    match rng.choice(("home", "food", "legs")):
        case "home":
            animal, home = rng.choice(facts.ANIMAL_HOMES)
            template = rng.choice(("Where does {} live?", "Where does {} live?", "Where can I find {}?"))
            return Exchange(template.format(article(animal)), f"{upper_first(article(animal))} lives {home}.")
        case "food":
            animal, food = rng.choice(facts.ANIMAL_FOOD)
            template = rng.choice(("What does {} eat?", "What does {} like to eat?", "What food does {} eat?"))
            return Exchange(template.format(article(animal)), f"{upper_first(article(animal))} eats {food}.")
    animal, count = rng.choice(facts.LEG_COUNTS)
    template = rng.choice(("How many legs does {} have?", "How many legs has {} got?"))
    return Exchange(template.format(article(animal)), f"{upper_first(article(animal))} has {count} legs.")


def definition(rng: Random) -> Exchange:
    thing, meaning = rng.choice(facts.DEFINITIONS)
    bare = thing.split(" ", 1)[1] if thing.startswith(("a ", "an ")) else thing
    template = rng.choice(WORDINGS["definition"])
    return Exchange(template.format(thing=thing, bare=bare), f"{upper_first(thing)} is {meaning}.")


def science(rng: Random) -> Exchange:
    questions, answer = rng.choice(facts.SCIENCE)
    return Exchange(rng.choice(questions), answer)


def small_talk(rng: Random) -> Exchange:
    questions, answers = rng.choice(facts.SMALL_TALK)
    usual = rng.random() < 0.8
    return Exchange(rng.choice(questions), answers[0] if usual else rng.choice(answers))


def verse(rng: Random) -> Exchange:
    if rng.random() < 0.4:
        question = rng.choice(WORDINGS["joke"])
        return Exchange(question, rng.choice(facts.JOKES))
    topic, poem = rng.choice(facts.POEMS)
    ask = rng.choice(("Write a poem", "Write me a poem", "Tell me a poem", "Write a short poem"))
    return Exchange(f"{ask} about {topic}." if rng.random() < 0.6 else f"{ask}.", poem)


def spelling(rng: Random) -> Exchange:
    word = rng.choice(facts.SPELLING_WORDS)
    match rng.choice(("spell", "first", "say")):
        case "spell":
            question = rng.choice(("How do you spell {}?", "Spell {}.", "Spell the word {}."))
            return Exchange(question.format(word), f"{'-'.join(word.upper())}.")
        case "first":
            question = rng.choice(("What is the first letter of {}?", "Which letter does {} start with?"))
            return Exchange(question.format(word), f"The first letter of {word} is {word[0].upper()}.")
    words = " ".join(rng.sample(facts.SPELLING_WORDS + NUMBER_WORDS + ANIMALS, rng.randint(1, 4)))
    question = rng.choice(WORDINGS["spelling_repeat"])
    return Exchange(question.format(words), f"{upper_first(words)}.")


def unknown(rng: Random) -> Exchange:
    if rng.random() < 0.5:
        return Exchange(rng.choice(facts.UNKNOWN_QUESTIONS), REFUSAL)
    template = rng.choice(WORDINGS["unknown"])
    return Exchange(template.format(rng.choice(facts.UNKNOWN_TOPICS)), REFUSAL)


def tale(rng: Random) -> Exchange:
    request, text = story(rng)
    mark = "?" if request.startswith(("Can", "Could")) else "."
    return Exchange(request + mark, text)


# How often each family is drawn, in rough proportion to the number of facts in it.
FAMILIES: tuple[tuple[Family, float], ...] = (
    (capital_of, 17), (country_of, 5), (is_capital, 3), (continent_of, 4), (language_of, 4), (about_country, 3),
    (colour_of, 4), (is_colour, 2), (opposite_of, 6), (word_form, 5), (animal_sound, 2), (baby_animal, 2),
    (animal_life, 3), (ability, 1), (naming, 3), (after_in_cycle, 3), (today_tomorrow, 1), (nth_of_cycle, 2),
    (arithmetic, 22), (compare, 2), (neighbour_number, 2), (neighbour_letter, 2), (counting, 11),
    (definition, 6), (science, 6), (small_talk, 12), (verse, 2), (spelling, 3), (unknown, 7),
    (nonsense, 1), (fun_fact, 1), (tale, 4),
)  # fmt: skip


def draw(rng: Random, exclude: Family | None = None) -> Exchange:
    families, weights = zip(*(row for row in FAMILIES if row[0] is not exclude), strict=True)
    family: Family = rng.choices(families, weights)[0]
    return family(rng)
