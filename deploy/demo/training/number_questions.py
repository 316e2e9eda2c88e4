"""Question families about numbers, letters and the calendar."""

from random import Random

from deploy.demo.training import facts
from deploy.demo.training.exchange import WORDINGS, Exchange, number, upper_first
from deploy.demo.training.facts import NUMBER_WORDS


def after_in_cycle(rng: Random) -> Exchange:
    label, cycle = rng.choice((("day", facts.DAYS), ("month", facts.MONTHS), ("season", facts.SEASONS)))
    here = rng.randrange(len(cycle))
    side, step = rng.choice((("after", 1), ("after", 1), ("before", -1)))
    there = cycle[(here + step) % len(cycle)]
    template = rng.choice(WORDINGS["after_in_cycle"])
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
    template = rng.choice(WORDINGS["arithmetic"])
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


def counting(rng: Random) -> Exchange:
    match rng.choice(("up", "up", "range", "down", "words", "twos")):
        case "range":
            first = rng.randint(0, 12)
            last = first + rng.randint(2, 8)
            template, numbers = rng.choice(WORDINGS["counting_range"]), range(first, last + 1)  # fmt: skip
            question = template.format(number(rng, first), number(rng, last))
        case "down":
            first = rng.randint(3, 20)
            question = rng.choice(WORDINGS["counting_down"]).format(number(rng, first))
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
    template = rng.choice(WORDINGS["counting_up"])
    if in_words:
        last = min(last, 10)
    question = template.format(number(rng, last))
    if not in_words:
        return Exchange(question, ", ".join(map(str, range(1, last + 1))) + ".")
    question = question.rstrip(".?") + rng.choice((" in words.", " using words.", " with words."))
    return Exchange(question, upper_first(", ".join(NUMBER_WORDS[1 : last + 1]) + "."))
