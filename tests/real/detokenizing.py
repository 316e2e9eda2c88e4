"""Compares the text of streams with the decoding of `tokenizers`, for text of all scripts and for random ids.

A grammar of ids forces an answer to consist of exactly these ids, so that any sequence can pass through a stream.
"""

import random
from concurrent.futures import ThreadPoolExecutor

from tests.e2e.server import Server
from tests.real.reference import Reference
from tests.real.report import Row
from tests.real.streams import read

TEXTS = (
    "👨‍👩‍👧‍👦 👩🏽‍🚀 🏳️‍🌈 🇫🇷🇯🇵 ❤️‍🔥 1️⃣",
    "日本語のテキスト、漢字とかな。 中文字符\uff0c你好\uff01 한국어 문장입니다.",
    "مرحبا بالعالم، كيف حالك؟ \u202b\u05e9\u05dc\u05d5\u05dd\u202c",
    "e\u0301 a\u0308\u0323 Z̸̢̛͎a̶͝l̵̨͠g̴o नमस्ते ก็ำ",
    "def f(x):\n\tif x:\n\t\treturn  x  # two\n\n\n\t\r\n\x0b\x0c",
    "Ångström, naïve, coöperate: “quotes” — dashes… ½ ² ٣٤ 2024-11-24",
    "  leading and trailing  ",
    "\u00a0\u2003\u200b\ufeff\u2028 odd spaces",
    "\U0001d518\U0001d52b\U0001d526\U0001d520\U0001d52c\U0001d521\U0001d522 𐍈 \U0010fffd \ufffd replacement",
    "don't we'll I'm he'd <b>&amp;</b> a\\b 'x'",
    "".join(map(chr, range(256))),
    "\n" * 9 + " " * 17 + "\t" * 5,
)
ENDS = ("<|endoftext|>", "<|im_end|>")
LENGTH = 16
AT_ONCE = 8


def forced(ids: list[int]) -> dict[str, object]:
    """Returns the fields of a request whose answer must consist of exactly these ids."""
    grammar = "start: " + " ".join(f"<[{id}]>" for id in ids)
    return {"prompt": "x", "guided_grammar": grammar, "max_tokens": len(ids) + 1}


def check(server: Server, reference: Reference, sequences: int, seed: int = 0) -> list[Row]:
    return [_texts(server, reference), _random_ids(server, reference, sequences, random.Random(seed))]


def _texts(server: Server, reference: Reference) -> Row:
    row = Row("texts of all scripts", f"{len(TEXTS)} texts, as ids, echoed and streamed")
    client, tokenizer = server.client, reference.tokenizer
    for text in TEXTS:
        name = repr(text[:16])
        ids = client.post("/tokenize", json={"prompt": text}).json()["tokens"]
        row.expect(ids == tokenizer(text).input_ids, f"{name}: /tokenize has other ids than tokenizers")
        text = tokenizer.decode(ids)  # drops some control characters, for which the model has no token
        back = client.post("/detokenize", json={"tokens": ids}).json()["prompt"]
        row.expect(back == text, f"{name}: /detokenize says {back!r}")
        for prompt in (text, ids):
            body = {"prompt": prompt, "echo": True, "max_tokens": 0, "logprobs": 0}
            (choice,) = client.post("/v1/completions", json=body).json()["choices"]
            row.expect(choice["text"] == text, f"{name}: echo says {choice['text']!r}")
            said = "".join(choice["logprobs"]["tokens"])
            whole = all("\ufffd" not in token for token in choice["logprobs"]["tokens"])
            row.expect(said == text or not whole, f"{name}: echoed tokens say {said!r}")
        got = read(client, "/v1/completions", forced(ids))
        row.expect((got.ids, got.text) == (ids, text), f"{name}: streamed as {got.text!r}")
        whole_answer = client.post("/v1/completions", json=forced(ids)).json()["choices"][0]["text"]
        row.expect(whole_answer == text, f"{name}: answered as {whole_answer!r}")
    return row


def _random_ids(server: Server, reference: Reference, sequences: int, draw: random.Random) -> Row:
    """Draws ids; half of them are parts of characters, so that most texts have invalid and incomplete characters."""
    tokenizer = reference.tokenizer
    plain = [id for id in range(len(tokenizer)) if tokenizer.decode([id]) not in ENDS]
    broken = [id for id in plain if "\ufffd" in tokenizer.decode([id])]
    row = Row("ids at random")

    def one(ids: list[int], shown: bool) -> str | None:
        got = read(server.client, "/v1/completions", {**forced(ids), "skip_special_tokens": not shown})
        wanted = tokenizer.decode(ids, skip_special_tokens=not shown, clean_up_tokenization_spaces=False)
        usage = got.usage or {}
        if got.ids != ids or got.finish_reason != "stop" or usage.get("completion_tokens") not in (LENGTH, LENGTH + 1):
            return f"{ids}: the answer has {got.ids}, {got.finish_reason}, {usage}"
        return None if got.text == wanted else f"{ids}: streamed as {got.text!r}, decoded as {wanted!r}"

    drawn = [[draw.choice(draw.choice((plain, broken))) for _ in range(LENGTH)] for _ in range(sequences)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = pool.map(one, drawn, [number % 2 == 0 for number in range(sequences)])
        row.wrong = [sentence for sentence in found if sentence]
    row.compared = f"{sequences} streams of {LENGTH} ids, of which {len(broken)} kinds are parts of characters"
    return row
