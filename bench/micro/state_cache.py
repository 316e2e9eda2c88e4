"""Measures gain and cost of recurrent-state checkpoints in the prefix cache: sends a prompt twice, for several numbers
of tokens between two checkpoints.

    python -m bench.micro.state_cache --model DIR [--tokens 3000] [--spacings 256 512 1024]

For each spacing, it starts a server and measures the seconds to the first token of three requests: a prompt of random
ids, the same prompt again, and the prompt with 200 more ids, as in a conversation's next turn. It also reports how many
of the prompt tokens came from the prefix cache.
"""

import argparse
import random
import time

from bench.client.server import served
from bench.client.summary import aligned, number
from bench.packages import httpx
from shared.config.flags import positive_int

TURN = 200  # tokens of the next turn


def first_token(client: httpx.Client, prompt: list[int]) -> float:
    begin = time.perf_counter()
    client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1, "temperature": 0}).raise_for_status()
    return time.perf_counter() - begin


def row(url: str, spacing: int, tokens: int) -> list[str]:
    draw = random.Random(0)
    prompt = [draw.randrange(1000, 20_000) for _ in range(tokens)]
    turn = [draw.randrange(1000, 20_000) for _ in range(TURN)]
    with httpx.Client(base_url=url, timeout=600) as client:
        first_token(client, turn)  # warms up
        measured = [number(first_token(client, ids)) for ids in (prompt, prompt, prompt + turn)]
        found = client.get("/stats").json()["prefix"]
    share = f"{found['hits']} of {found['queries']}"
    return [str(spacing), *measured, share]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens", type=positive_int, default=3000)
    parser.add_argument("--spacings", type=positive_int, nargs="+", default=[256, 512, 1024])
    args = parser.parse_args()
    rows = [["spacing", "first, s", "second, s", "next turn, s", "tokens from the cache"]]
    for spacing in args.spacings:
        flags = ("--state-checkpoint-tokens", str(spacing), "--kv-cache-gb", "2", "--max-seq-len", "4096")
        with served(args.model, flags) as target:
            rows.append(row(target.url, spacing, args.tokens))
    print(aligned(rows))


if __name__ == "__main__":
    main()
