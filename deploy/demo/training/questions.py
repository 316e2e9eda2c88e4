"""Question families: each draws one question with its one right answer. Formatting is `corpus`'s."""

from collections.abc import Callable
from random import Random
from typing import NamedTuple, TypeAlias

from deploy.demo.training import facts
from deploy.demo.training.facts import NUMBER_WORDS, Country
from deploy.demo.training.stories import ANIMALS, article, story


class Exchange(NamedTuple):
    question: str
    answer: str


Family: TypeAlias = Callable[[Random], Exchange]

REFUSAL = "I do not know that. I am a very small model."


def upper_first(text: str) -> str:
    return text[:1].upper() + text[1:]


def lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]


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
    template = rng.choice(
        ("What is the capital of {}?", "What is the capital of {}?", "What is the capital of {}?",
         "What is the capital city of {}?", "What's the capital of {}?", "What's the capital city of {}?",
         "Capital of {}?", "The capital of {}?", "Which city is the capital of {}?", "Name the capital of {}.",
         "Give me the capital of {}.", "What city is the capital of {}?", "Tell me the capital of {}.",
         "Do you know the capital of {}?", "Tell me what the capital of {} is.",
         "I want to know the capital of {}.", "{} capital?", "Which city is the capital city of {}?",
         "What would be the capital of {}?", "What is the name of the capital of {}?", "What is {}'s capital?",
         "What is {}'s capital city?", "The capital of {} is?", "Do you know what the capital of {} is?")
    )  # fmt: skip
    return Exchange(upper_first(template.format(name)), capital_answer(row))


def country_of(rng: Random) -> Exchange:
    row = country(rng)
    if row.capital == "London":
        row = facts.COUNTRIES[0]
    template = rng.choice(
        ("{} is the capital of which country?", "Which country has the capital {}?",
         "What country is {} the capital of?", "Of which country is {} the capital?",
         "{} is the capital of what country?", "In which country is {}?", "Where is {}?",
         "Which country is {} in?", "What country is {} in?", "Tell me about {}.", "What is {}?")
    )  # fmt: skip
    return Exchange(template.format(row.capital), f"{row.capital} is the capital of {row.name}.")


def is_capital(rng: Random) -> Exchange:
    row = country(rng)
    claimed = row if rng.random() < 0.5 else country(rng)
    question = f"Is {claimed.capital} the capital of {row.name}?"
    verdict = "Yes" if claimed.capital == row.capital else "No"
    return Exchange(question, f"{verdict}, {lower_first(capital_answer(row))}")


def continent_of(rng: Random) -> Exchange:
    row = country(rng)
    template = rng.choice(
        ("On which continent is {}?", "Which continent is {} in?", "What continent is {} in?",
         "What continent is {} on?", "In which continent is {}?", "Where is {}?", "Where is {} located?",
         "Which part of the world is {} in?")
    )  # fmt: skip
    return Exchange(template.format(row.name), is_in(row))


def about_country(rng: Random) -> Exchange:
    row = country(rng)
    template = rng.choice(
        (
            "Tell me about {}.",
            "What do you know about {}?",
            "What is {}?",
            "Describe {}.",
            "Tell me something about {}.",
        )
    )
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
    template = rng.choice(
        ("What language do people speak in {}?", "Which language is spoken in {}?",
         "What is the language of {}?", "What language is spoken in {}?", "What do they speak in {}?",
         "Which language do they speak in {}?", "What is the main language of {}?")
    )  # fmt: skip
    return Exchange(template.format(row.name), f"People in {row.name} speak {row.language}.")


def colour_of(rng: Random) -> Exchange:
    thing, verb, colour = rng.choice(facts.COLOURS)
    word = rng.choice(("colour", "color"))
    template = rng.choice(
        ("What {word} {verb} {thing}?", "What {word} {verb} {thing}?", "Which {word} {verb} {thing}?",
         "What is the {word} of {thing}?", "Tell me the {word} of {thing}.", "The {word} of {thing}?",
         "Do you know the {word} of {thing}?", "What {word} does {thing} have?", "Name the {word} of {thing}.")
    )  # fmt: skip
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
    template = rng.choice(
        ("Name {} {}.", "List {} {}.", "Tell me {} {}.", "Give me {} {}.", "Write down {} {}.", 
         "Can you name {} {}?",          "What are {} {}?", "Do you know {} {}?")
    )  # fmt: skip
    question = template.format(_number(rng, count), category)
    return Exchange(question, f"{upper_first(', '.join(members[: count - 1]))} and {members[count - 1]}.")


def nonsense(rng: Random) -> Exchange:
    text = rng.choice(facts.GIBBERISH)
    if rng.random() < 0.5:
        letters = "abcdefghijklmnopqrstuvwxyz0123456789"
        words = ("".join(rng.choices(letters, k=rng.randint(2, 8))) for _ in range(rng.randint(1, 4)))
        text = " ".join(words)
    return Exchange(text, "I do not understand that. I am a very small model.")


def fun_fact(rng: Random) -> Exchange:
    question = rng.choice(
        ("Tell me a fact.", "Tell me something.", "Tell me a fun fact.", "Say something.", "Do you know a fact?",
         "Give me a fact.", "Tell me something interesting.", "Teach me something.")
    )  # fmt: skip
    return Exchange(question, rng.choice(facts.FUN_FACTS))


def opposite_of(rng: Random) -> Exchange:
    pairs = facts.OPPOSITES + facts.ONE_WAY_OPPOSITES
    index = rng.randrange(len(pairs))
    word, opposite = pairs[index]
    if index < len(facts.OPPOSITES) and rng.random() < 0.5:
        word, opposite = opposite, word
    template = rng.choice(
        ("What is the opposite of {}?", "What is the opposite of {}?", "Opposite of {}?",
         "What's the opposite of {}?", "Tell me the opposite of {}.", "What is the opposite of the word {}?",
         'What is the opposite of "{}"?', "Give me the opposite of {}.", "Which word is the opposite of {}?")
    )  # fmt: skip
    return Exchange(template.format(word), f"The opposite of {word} is {opposite}.")


def word_form(rng: Random) -> Exchange:
    table, label = rng.choice(((facts.PLURALS, "plural"), (facts.PLURALS, "plural"), (facts.PAST_TENSES, "past tense")))
    word, form = rng.choice(table)
    template = rng.choice(
        ("What is the {} of {}?", "What is the {} of {}?", "What's the {} of {}?", "{} of {}?",
         "Tell me the {} of {}.", "What is the {} form of {}?", "Give me the {} of {}.",
         'What is the {} of "{}"?', "What is the {} of the word {}?")
    )  # fmt: skip
    return Exchange(upper_first(template.format(label, word)), f"The {label} of {word} is {form}.")


def animal_sound(rng: Random) -> Exchange:
    animal, sound = rng.choice(facts.ANIMAL_SOUNDS)
    template = rng.choice(
        ("What sound does {} make?", "What sound does {} make?", "What does {} say?",
         "What noise does {} make?", "Which sound does {} make?", "How does {} sound?", "What does {} sound like?")
    )  # fmt: skip
    what = article(animal) if rng.random() < 0.8 else f"the {animal}"
    return Exchange(template.format(what), f"{upper_first(article(animal))} says {sound}.")


def baby_animal(rng: Random) -> Exchange:
    animal, baby = rng.choice(facts.BABY_ANIMALS)
    template = rng.choice(
        ("What is a baby {} called?", "What do you call a baby {}?", "What is the name of a baby {}?",
         "What is the young of {a} called?", "What is a young {} called?", "Name for a baby {}?",
         "How do you call a baby {}?")
    )  # fmt: skip
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


def after_in_cycle(rng: Random) -> Exchange:
    label, cycle = rng.choice((("day", facts.DAYS), ("month", facts.MONTHS), ("season", facts.SEASONS)))
    here = rng.randrange(len(cycle))
    side, step = rng.choice((("after", 1), ("after", 1), ("before", -1)))
    there = cycle[(here + step) % len(cycle)]
    template = rng.choice(
        ("What {label} comes {side} {here}?", "Which {label} comes {side} {here}?",
         "What comes {side} {here}?", "What {label} is {side} {here}?", "Which {label} is {side} {here}?",
         "What is the {label} {side} {here}?")
    )  # fmt: skip
    question = template.format(label=label, side=side, here=cycle[here])
    return Exchange(question, f"{upper_first(there)} comes {side} {cycle[here]}.")


def today_tomorrow(rng: Random) -> Exchange:
    here = rng.randrange(7)
    when, verb, step = rng.choice((("tomorrow", "is", 1), ("yesterday", "was", -1)))
    there = facts.DAYS[(here + step) % 7]
    question = f"If today is {facts.DAYS[here]}, what day {verb} {when}?"
    return Exchange(question, f"If today is {facts.DAYS[here]}, {when} {verb} {there}.")


def nth_of_cycle(rng: Random) -> Exchange:
    match rng.choice(("day", "month", "month days")):
        case "day":
            index = rng.randrange(7)
            nth, name = facts.ORDINALS[index], facts.DAYS[index]
            question = rng.choice(("What is the {} day of the week?", "Which day is the {} day of the week?"))
            return Exchange(question.format(nth), f"The {nth} day of the week is {name}.")
        case "month":
            index = rng.randrange(12)
            nth, name = facts.ORDINALS[index], facts.MONTHS[index]
            question = rng.choice(("What is the {} month of the year?", "Which month is the {} month?"))
            return Exchange(question.format(nth), f"The {nth} month of the year is {name}.")
    index = rng.randrange(12)
    name = facts.MONTHS[index]
    question = rng.choice(("How many days are in {}?", "How many days does {} have?", "How long is {}?"))
    return Exchange(question.format(name), f"{name} has {facts.MONTH_DAYS[index]} days.")


def arithmetic(rng: Random) -> Exchange:
    sign = rng.choice("++-*")
    left, right = rng.randint(0, 10), rng.randint(0, 10)
    if sign == "-":
        left += right
    value = {"+": left + right, "-": left - right, "*": left * right}[sign]
    if rng.random() < 0.2 and max(left, right, value) <= 20:
        word = {"+": "plus", "-": "minus", "*": "times"}[sign]
        a, b, c = NUMBER_WORDS[left], NUMBER_WORDS[right], NUMBER_WORDS[value]
        question = rng.choice(("What is {} {} {}?", "{} {} {}", "How much is {} {} {}?"))
        return Exchange(upper_first(question.format(a, word, b)), upper_first(f"{a} {word} {b} is {c}."))
    return Exchange(_sum_wording(rng, left, sign, right), f"{left} {sign} {right} = {value}.")


def _sum_wording(rng: Random, left: int, sign: str, right: int) -> str:
    word = {"+": "plus", "-": "minus", "*": "times"}[sign]
    written = rng.choice((sign, sign, word, "x" if sign == "*" else sign))
    template = rng.choice(
        ("What is {} {} {}?", "What is {} {} {}?", "{} {} {} = ?", "{} {} {}", "{} {} {} =", "How much is {} {} {}?",
         "Calculate {} {} {}.", "What's {} {} {}?", "What does {} {} {} make?", "Compute {} {} {}.",
         "{} {} {}?", "Solve {} {} {}.")
    )  # fmt: skip
    text = template.format(left, written, right)
    if written == sign and rng.random() < 0.3:
        text = text.replace(f" {sign} ", sign)
    if sign == "-" and rng.random() < 0.1:
        text = f"Subtract {right} from {left}."
    if sign == "+" and rng.random() < 0.1:
        text = rng.choice(("Add {} and {}.", "What is the sum of {} and {}?")).format(left, right)
    return text


def compare(rng: Random) -> Exchange:
    left, right = rng.sample(range(21), 2)
    word, pick = rng.choice((("bigger", max), ("larger", max), ("greater", max), ("smaller", min)))
    question = f"Which number is {word}, {left} or {right}?"
    if rng.random() < 0.3:
        question = f"What is {word}, {left} or {right}?"
    value = pick(left, right)
    return Exchange(question, f"{value} is {word} than {left + right - value}.")


def neighbour_number(rng: Random) -> Exchange:
    here = rng.randint(1, 30)
    side, step = rng.choice((("after", 1), ("after", 1), ("before", -1)))
    question = rng.choice(("What number comes {} {}?", "Which number comes {} {}?", "What comes {} {}?"))
    return Exchange(question.format(side, here), f"{here + step} comes {side} {here}.")


def neighbour_letter(rng: Random) -> Exchange:
    here = rng.randrange(25)
    first, second = chr(65 + here), chr(66 + here)
    if rng.random() < 0.7:
        question = rng.choice(
            (
                "What letter comes after {}?",
                "Which letter comes after {}?",
                "What is the letter after {}?",
            )
        )
        return Exchange(question.format(first), f"{second} comes after {first}.")
    return Exchange(f"Which letter comes before {second}?", f"{first} comes before {second}.")


def _number(rng: Random, value: int) -> str:
    return NUMBER_WORDS[value] if value <= 20 and rng.random() < 0.5 else str(value)


def counting(rng: Random) -> Exchange:
    match rng.choice(("up", "up", "range", "down", "words", "twos")):
        case "range":
            first = rng.randint(0, 12)
            last = first + rng.randint(2, 8)
            template, numbers = rng.choice(
                ("Count from {} to {}.", "Count up from {} to {}.", "Count {} to {}.",
                 "List the numbers from {} to {}.")
            ), range(first, last + 1)  # fmt: skip
            question = template.format(_number(rng, first), _number(rng, last))
        case "down":
            first = rng.randint(3, 20)
            question = rng.choice(
                ("Count backwards from {}.", "Count down from {}.", "Count backward from {} to 1.",
                 "Count down from {} to one.", "Count from {} down to 1.", "Count from {} to 1.",
                 "Count backwards starting at {}.", "Start at {} and count down.", "Count down starting from {}.")
            ).format(_number(rng, first))  # fmt: skip
            numbers = range(first, 0, -1)
        case "twos":
            last = rng.choice((6, 8, 10, 10, 12, 14, 16, 18, 20, 20))
            question = rng.choice(("Count to {} by twos.", "List the even numbers up to {}.")).format(last)
            numbers = range(2, last + 1, 2)
        case style:
            return _count_up(rng, in_words=style == "words")
    return Exchange(question, ", ".join(map(str, numbers)) + ".")


def _count_up(rng: Random, in_words: bool) -> Exchange:
    last = rng.choice((3, 4, 5, 5, 6, 7, 8, 9, 10, 10, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 20))
    template = rng.choice(
        ("Count to {}.", "Count to {}.", "Count to {}.", "Count up to {}.", "Count from 1 to {}.",
         "Count from one to {}.", "Can you count to {}?", "List the numbers up to {}.",
         "Write the numbers from 1 to {}.", "Count 1 to {}.")
    )  # fmt: skip
    if in_words:
        last = min(last, 10)
    question = template.format(_number(rng, last))
    if not in_words:
        return Exchange(question, ", ".join(map(str, range(1, last + 1))) + ".")
    question = question.rstrip(".?") + rng.choice((" in words.", " using words.", " with words."))
    return Exchange(question, upper_first(", ".join(NUMBER_WORDS[1 : last + 1]) + "."))


def definition(rng: Random) -> Exchange:
    thing, meaning = rng.choice(facts.DEFINITIONS)
    bare = thing.split(" ", 1)[1] if thing.startswith(("a ", "an ")) else thing
    template = rng.choice(
        ("What is {thing}?", "What is {thing}?", "What is {thing}?", "What's {thing}?", "Explain what {thing} is.",
         "Tell me what {thing} is.", "What does the word {bare} mean?", "Define {bare}.",
         "Do you know what {thing} is?", "Explain {bare}.", "Tell me about {thing}.", "Describe {thing}.")
    )  # fmt: skip
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
        question = rng.choice(
            (
                "Tell me a joke.",
                "Do you know a joke?",
                "Make me laugh.",
                "Say something funny.",
                "Another joke, please.",
            )
        )
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
    question = rng.choice(("Say {}.", "Repeat: {}", "Repeat after me: {}", "Please say {}.", "Say the words {}."))
    return Exchange(question.format(words), f"{upper_first(words)}.")


def unknown(rng: Random) -> Exchange:
    if rng.random() < 0.5:
        return Exchange(rng.choice(facts.UNKNOWN_QUESTIONS), REFUSAL)
    template = rng.choice(
        ("Explain {}.", "What do you know about {}?", "Tell me about {}.", "Teach me {}.", "How does {} work?",
         "Explain {} to me.", "Write an essay about {}.", "What is the history of {}?", "Help me with {}.",
         "I have a question about {}.", "Give me an overview of {}.", "What is {}?", "Write code for {}.",
         "Why is {} important?", "Who invented {}?", "Summarize {}.", "How do I learn {}?", "Compare {} and cats.",
         "What do you think about {}?", "Give me five facts about {}.")
    )  # fmt: skip
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
