"""A small story grammar: a hero, a place, a plot, an ending. Knows nothing of chats or tokens."""

from random import Random
from typing import NamedTuple

from deploy.demo.training.facts import NAMES_HE, NAMES_SHE

ANIMALS = (
    "cat", "dog", "rabbit", "fox", "bear", "mouse", "bird", "frog", "horse", "elephant", "lion",
    "turtle", "owl", "duck", "pig", "squirrel", "penguin", "hedgehog", "kitten", "puppy", "dragon",
    "robot", "wolf", "monkey", "fish", "bee", "sheep", "tiger", "whale", "unicorn", "snail", "panda",
)  # fmt: skip
GIRLS = ("girl", "princess", "queen", "witch", "woman", "mermaid")
BOYS = ("boy", "prince", "king", "wizard", "man", "knight")
PEOPLE = ("farmer", "baker", "teacher", "sailor", "child", "pirate", "giant", "fairy")
SIZES = ("little", "small", "young", "clever", "kind", "curious", "brave", "shy")
PLACES = (
    "the forest", "a small village", "the mountains", "a quiet valley", "a town by the sea",
    "a green garden", "an old castle", "a house near the river", "a big city", "a farm",
    "an island", "the edge of the desert",
)  # fmt: skip
FRIENDS = ("bird", "mouse", "fox", "squirrel", "frog", "owl", "rabbit", "dog", "cat", "turtle")
THINGS = (
    "ball",
    "golden key",
    "red kite",
    "blue hat",
    "silver bell",
    "little boat",
    "drum",
    "book",
)
FOODS = ("apples", "bread", "honey", "berries", "soup", "cake", "nuts", "pears")


class Theme(NamedTuple):
    topics: tuple[str, ...]  # what a request may call it: "Tell me a story about ..."
    body: tuple[str, ...]  # one paragraph each; slots as in `_slots`
    ending: str


THEMES: tuple[Theme, ...] = (
    Theme(
        ("friendship", "a new friend", "being lonely", "friends"),
        (
            "{name} was often alone and wished for a friend. One morning {he} heard a small voice. "
            "It was a {friend} who was lost and afraid.",
            '"Do not cry," said {name}. "I will help you find the way home." They walked together '
            "all day, and they talked and laughed.",
            'When they came to the home of the {friend}, it said, "Thank you. Will you be my '
            'friend?" {name} smiled and said yes.',
        ),
        "From that day on, {name} was never lonely again.",
    ),
    Theme(
        ("a lost {thing}", "losing something", "a {thing}"),
        (
            "{name} had a {thing} and loved it very much. One day the {thing} was gone. {He} looked "
            "under the bed and behind the door, but it was not there.",
            'Then {he} met a {friend}. "I saw your {thing} near the river," said the {friend}. '
            '"Come, I will show you."',
            "They ran to the river, and there it was, lying in the grass. {name} was so happy that {he} danced.",
        ),
        "{name} thanked the {friend}, and they played with the {thing} until the sun went down.",
    ),
    Theme(
        ("sharing", "food", "{food}", "a hungry friend"),
        (
            "One cold day, {name} found some {food}. There was just enough for one. {He} was hungry and began to eat.",
            'Then a {friend} came by. "I have not eaten all day," it said. {name} looked at the {food} '
            "and thought for a while.",
            '"Sit down," said {name}. "We will share." So they sat side by side and ate together, and '
            "the {food} tasted better than ever.",
        ),
        "That night {name} learned that sharing makes the heart warm.",
    ),
    Theme(
        ("a storm", "being brave", "courage", "rain"),
        (
            "One night there was a great storm. The wind blew and the thunder was loud. {name} was "
            "afraid and hid under a blanket.",
            "Then {he} heard someone call for help. A {friend} was outside in the rain. {name} took a "
            "deep breath, opened the door, and ran out into the dark.",
            '{He} found the {friend} under a tree and led it inside, where it was warm. "You are very '
            'brave," said the {friend}.',
        ),
        "In the morning the sun came out, and {name} was not afraid of storms any more.",
    ),
    Theme(
        ("a dream", "flying", "the stars", "the moon"),
        (
            "Every night {name} looked up at the moon and wished to fly. {His} friends laughed and "
            "said that it could not be done.",
            'One night a {friend} came to the window. It had a magic feather. "Hold this," it said, '
            '"and close your eyes." Up and up they went, over the trees and the hills.',
            "They flew past the stars and sat on the moon. From there the whole world looked small and quiet.",
        ),
        "When {name} woke up, there was a feather in {his} hand, and {he} smiled.",
    ),
    Theme(
        ("a race", "being slow", "not giving up", "sport"),
        (
            "One day there was a race, and everyone wanted to win. {name} was not very fast, and a "
            '{friend} said, "You will be the last."',
            "But {name} did not give up. {He} practised every day, in the sun and in the rain. On the "
            "day of the race {he} ran as well as {he} could.",
            "Near the end the {friend} fell down. {name} stopped and helped it up, and they crossed the line together.",
        ),
        "Everyone cheered, because being kind is better than being first.",
    ),
    Theme(
        ("a treasure", "an adventure", "a map", "magic"),
        (
            "One day {name} found an old map. It showed the way to a treasure. {He} packed some {food} "
            "and set out at once.",
            '{He} crossed a river and climbed a hill. On the hill sat a {friend}. "I know this map," '
            'it said. "Let us go together."',
            "Under a tall tree they dug and found a box. Inside was a {thing}, old and beautiful. They "
            "took turns to carry it home.",
        ),
        '"The best treasure is a friend," said {name}, and the {friend} agreed.',
    ),
    Theme(
        ("a garden", "a seed", "patience", "flowers", "a flower"),
        (
            "In spring {name} planted a seed in the ground. {He} gave it water every day and waited. "
            "But nothing happened.",
            '"It will not grow," said a {friend}. But {name} went on. {He} sang to the seed and kept it '
            "safe from the wind.",
            "Then one warm morning a green leaf came up. Soon there was a tall flower, as yellow as the "
            "sun, and everyone came to see it.",
        ),
        "{name} was proud, and {he} knew that good things take time.",
    ),
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
    """The hero's kind and name, and whether the hero is a she."""
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
    """A request for a story, without its full stop, and the story that answers it."""
    theme = rng.choice(THEMES)
    slots = _slots(rng, *_hero(rng))
    verb = rng.choice(("named", "called", "named"))
    hero = article(f"{slots['size']} {slots['kind']}")
    opening = f"Once upon a time, there was {hero} {verb} {{name}} who lived in {{place}}."
    first, *others = theme.body
    text = "\n\n".join((f"{opening} {first}", *others[:-1], f"{others[-1]} {theme.ending}"))
    return _wording(rng, rng.choice(_requests(slots, theme))), text.format_map(slots)
