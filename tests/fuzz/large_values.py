"""Drives a server with the largest values that its fields allow, with a vocabulary of 152,000 tokens.

    python -m tests.fuzz.large_values [--only TEXT] [--attacks | --fields] [--model FOLDER]

Each request is sent alone, while another client with a key of its own reads a stream. The table has a row for each
request: its status, how long it took, the longest silence of the other stream meanwhile, and how much the processes
grew. A request after which the silence was too long is sent up to ATTEMPTS times, because a busy machine is slow at
times. Two sources:

- every field of every POST route in the OpenAPI document, with the largest value that its schema allows
- ATTACKS: small requests with combinations of fields that multiply each other
"""

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.server import Server, serving
from tests.fuzz import wide_model
from tests.fuzz.watch import Watch, watching

SILENCE_S = 0.5  # the longest silence of another stream that is in order on an idle machine
GROWTH_MIB = 64.0  # the same for the growth of all processes with one request, above what docs/security.md states
TIMEOUT_S = 120.0
PATH = "/v1/completions"  # of the other client's streams
ATTEMPTS = 3
CONTEXT = 2048  # so that a request without a limit on its tokens ends within TIMEOUT_S
KEYS = {"--admin-keys": "sk-sender sender\n", "--api-keys": "sk-other other\n"}
SENDER, OTHER = {"Authorization": "Bearer sk-sender"}, {"Authorization": "Bearer sk-other"}
JSON = {"Content-Type": "application/json"} | SENDER
MOST_ITEMS = 1 << 17  # of arrays and objects whose schema has no bound
MOST_CHARS = 1 << 20  # of strings without a bound
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
TEXT = {"prompt": "a", "max_tokens": 4, "ignore_eos": True}
BASES: Mapping[str, dict[str, Any]] = {
    "/v1/completions": TEXT,
    "/v1/chat/completions": CHAT,
    "/v1/messages": CHAT,
    "/v1/messages/count_tokens": {"messages": CHAT["messages"]},
    "/v1/responses": {"input": "a", "max_output_tokens": 4},
    "/v1/responses/input_tokens": {"input": "a"},
    "/api/chat": {"model": "m", "messages": CHAT["messages"], "options": {"num_predict": 4}, "stream": False},
    "/api/generate": {"model": "m", "prompt": "a", "options": {"num_predict": 4}, "stream": False},
    "/completion": {"prompt": "a", "n_predict": 4},
    "/infill": {"input_prefix": "a", "input_suffix": "b", "n_predict": 4},
    "/generate": {"text": "a", "sampling_params": {"max_new_tokens": 4}},
    "/tokenize": {"content": "a"},
    "/detokenize": {"tokens": [5]},
    "/v1/logprobs": {"prompt": "ab"},
    "/generative_scoring": {"query": "a", "items": ["b"], "label_token_ids": [5]},
    "/v1/systemone": {"state": "a", "questions": {"a": {"type": "noul"}}},
    "/v1/decisions": {"input": "a", "questions": [{"type": "predicate", "instructions": "a"}]},
    "/apply-template": {"messages": CHAT["messages"]},
}
# required fields of all other routes
REQUIRED: Mapping[str, Any] = CHAT | TEXT | {
    "model": "m", "input": "a", "text_1": "a", "text_2": "a", "query": "a", "documents": ["a"], "receipt": {},
    "request": {"prompt": "a"}, "lora_name": "a", "lora_path": "a", "content": "a", "name": "m",
    "metadata": {}, "inputs": "a", "texts": ["a"], "items": [], "input_type": "search_query",
    "embedding_types": ["float"], "source": "m", "destination": "m", "input_file_id": "file-a",
    "endpoint": "/v1/completions", "completion_window": "24h", "requests": [{"custom_id": "a", "params": CHAT}],
    "adapters": [], "id": 0, "scale": 1.0,
}  # fmt: skip
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict")  # of tokens: fields of other routes
ALL = [*range(3, wide_model.VOCAB)]
WORDS = [f"{number}{'ab' * 60}" for number in range(256)]
DEEP = "root ::= " + "(" * 9000 + '"a"' + ")" * 9000
ATTACKS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("nothing but n = 128, to compare", "/v1/completions", TEXT | {"n": 128}),
    ("twenty samplers, n = 32", "/v1/completions", TEXT | {"samplers": ["typ_p"] * 20, "typical_p": 0.99, "n": 32}),
    ("sixteen samplers, n = 32", "/v1/completions", TEXT | {"samplers": ["typ_p"] * 16, "typical_p": 0.99, "n": 32}),
    (
        "each sampler, n = 64", "/v1/completions",
        TEXT | {"typical_p": 0.99, "top_p": 0.99, "min_p": 1e-4, "top_n_sigma": 9, "xtc_probability": 1,
                "xtc_threshold": 1e-7, "dry_multiplier": 1, "dynatemp_range": 0.1, "repeat_last_n": -1,
                "repeat_penalty": 1.1, "n": 64, "max_tokens": 2},
    ),
    ("Mirostat, n = 64", "/v1/completions", TEXT | {"mirostat": 2, "mirostat_tau": 1e6, "n": 64}),
    ("bad words, n = 128", "/v1/completions", TEXT | {"bad_words": WORDS, "n": 128}),
    ("all biases, n = 16", "/v1/completions", TEXT | {"logit_bias": dict.fromkeys(map(str, ALL), 1), "n": 16}),
    ("all biases, n = 3", "/v1/completions", TEXT | {"logit_bias": dict.fromkeys(map(str, ALL), 1), "n": 3}),
    ("all ids allowed, n = 16", "/v1/completions", TEXT | {"allowed_token_ids": ALL, "n": 16}),
    ("all ids allowed, n = 3", "/v1/completions", TEXT | {"allowed_token_ids": ALL, "n": 3}),
    ("all ids allowed, 800 prompts", "/v1/completions", TEXT | {"allowed_token_ids": ALL, "prompt": ["a"] * 800}),
    (
        "prompt_logprobs of 60 prompts", "/v1/completions",
        TEXT | {"prompt": ["ab" * 500] * 60, "prompt_logprobs": 20, "max_tokens": 1},
    ),
    (
        "prompt_logprobs of 6 prompts", "/v1/completions",
        TEXT | {"prompt": ["ab" * 500] * 6, "prompt_logprobs": 20, "max_tokens": 1},
    ),
    (
        "echo with log-probabilities", "/v1/completions",
        TEXT | {"prompt": ["ab" * 500] * 6, "echo": True, "logprobs": 20, "max_tokens": 1},
    ),
    (
        "SGLang's return_logprob", "/generate",
        {"text": ["ab" * 500] * 6, "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 20,
         "return_text_in_logprobs": True, "sampling_params": {"max_new_tokens": 1}},
    ),
    ("scores in lists", "/v1/logprobs", {"prompt": ["ab" * 500] * 12, "top_logprobs": 20}),
    (
        "three million values for the template", "/v1/chat/completions",
        CHAT | {"chat_template_kwargs": {"tools": [0] * 3_000_000}},
    ),
    ("10,000 messages", "/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": "a"}] * 10_000}),
    ("pieces of 1 MiB", "/tokenize", {"content": "ab" * (1 << 19), "with_pieces": True}),
    ("pieces of 7 MiB", "/tokenize", {"content": "ab" * (7 << 19), "with_pieces": True, "return_token_strs": True}),
    ("a count of 7 MiB", "/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "ab" * (7 << 19)}]}),
    ("two million ids", "/detokenize", {"tokens": [5] * 2_000_000}),
    ("DRY breakers", "/v1/completions", TEXT | {"dry_multiplier": 1, "dry_sequence_breakers": ["e", "w1", "ab", ":"]}),
    ("a grammar that multiplies", "/v1/completions", TEXT | {"guided_regex": "((a{100}){100}){100}"}),
    ("a deep GBNF", "/completion", {"prompt": "a", "n_predict": 4, "grammar": DEEP}),
)  # fmt: skip


class OtherStream:
    """Another client, which reads one stream after the other. silence: the longest time without an event, in s"""

    def __init__(self, url: str) -> None:
        self._url, self._stop = url, threading.Event()
        self._last, self._longest = time.monotonic(), 0.0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def reset(self) -> None:
        self._last, self._longest = time.monotonic(), 0.0

    @property
    def silence(self) -> float:
        return max(self._longest, time.monotonic() - self._last)

    def close(self) -> None:
        self._stop.set()
        self._thread.join(TIMEOUT_S)

    def _run(self) -> None:
        body = {"prompt": "a", "max_tokens": CONTEXT - 100, "ignore_eos": True, "stream": True, "temperature": 0}
        while not self._stop.is_set():
            with (
                suppress(httpx.HTTPError),
                httpx.stream("POST", self._url + PATH, json=body, headers=OTHER, timeout=TIMEOUT_S) as response,
            ):
                for _ in response.iter_raw():
                    now = time.monotonic()
                    self._longest, self._last = max(self._longest, now - self._last), now
                    if self._stop.is_set():
                        break


@dataclass(frozen=True)
class Row:
    """The result of one request. growth: in MiB, by role"""

    name: str
    status: int
    seconds: float
    silence: float
    growth: dict[str, float]
    died: str
    answer: str

    @property
    def is_fine(self) -> bool:
        """Whether the request harmed nobody: it had an answer, no process died, and others did not wait."""
        return self.status not in (0, 500) and not self.died and self.silence <= SILENCE_S


def attempt(watch: Watch, other: OtherStream, name: str, path: str, body: Any) -> Row:
    sent = json.dumps(body).encode()  # before the clock starts: the other stream is read in this process, too
    before, began = watch.memory(), time.monotonic()
    other.reset()
    try:
        answer = httpx.post(watch.url + path, content=sent, headers=JSON, timeout=TIMEOUT_S)
        status, text = answer.status_code, answer.text[:200]
    except httpx.HTTPError as error:
        status, text = 0, f"{type(error).__name__}"
    seconds, silence, after = time.monotonic() - began, other.silence, watch.memory()
    growth = {role: after[role] - before[role] for role in after}
    return Row(name, status, seconds, silence, growth, watch.died(), text if status != 200 else "")


def attempts(watch: Watch, other: OtherStream, name: str, path: str, body: Any) -> Row:
    """Returns the attempt with the shortest silence, of one or, if the machine may have been busy, some."""
    rows = [attempt(watch, other, name, path, body)]
    while rows[-1].silence > SILENCE_S and not rows[-1].died and len(rows) < ATTEMPTS:
        rows.append(attempt(watch, other, name, path, body))
    return next((row for row in rows if row.died), min(rows, key=lambda row: row.silence))


def fields(document: Any) -> Iterator[tuple[str, str, Any]]:
    """Yields (name, path, body) for each field of each POST route with a body, with its largest value.

    Bodies that are arrays come with as many entries as they may have.
    """
    for path, methods in document["paths"].items():
        content = methods.get("post", {}).get("requestBody", {}).get("content", {})
        if "application/json" not in content:
            continue
        schema = resolved(content["application/json"]["schema"], document)
        if schema.get("type") == "array":
            yield f"{path} (body)", path, largest(schema, document)
        seen = set[str]()
        for option in [resolved(one, document) for one in schema.get("anyOf", [schema])]:
            base = next((BASES[name] for name in (path, "/v1" + path, path.removeprefix("/v1")) if name in BASES), None)
            base = base_of(option) if base is None else base
            for field, one in option.get("properties", {}).items():
                value = largest(one, document)
                if value is not None and field not in seen:
                    seen.add(field)
                    yield f"{path} {field}", path, base | {field: value}


def base_of(schema: Any) -> dict[str, Any]:
    """Returns a small body with the required fields of a route, which asks for few tokens."""
    limit = [name for name in LIMITS if name in schema.get("properties", {})][:1]
    documents = {"query", "documents"} <= schema.get("properties", {}).keys()  # the same as `texts`, so not required
    names = [*schema.get("required", ()), *(["documents"] if documents else [])]
    return {name: REQUIRED[name] for name in names} | dict.fromkeys(limit, 4)


def resolved(schema: Any, document: Any) -> Any:
    while "$ref" in schema:
        node: Any = document
        for name in schema["$ref"].removeprefix("#/").split("/"):
            node = node[name]
        schema = node
    return schema


def largest(schema: Any, document: Any, depth: int = 0) -> Any:
    """Returns the largest value that a schema allows, within MOST_ITEMS and MOST_CHARS; None if it allows only null."""
    schema = resolved(schema, document)
    if "anyOf" in schema or "oneOf" in schema:
        options = [largest(one, document, depth) for one in schema.get("anyOf") or schema["oneOf"]]
        return max((one for one in options if one is not None), key=size, default=None)
    if "enum" in schema or "const" in schema:
        return schema.get("const", [*schema.get("enum", [None])][-1])
    few = 4 if depth else MOST_ITEMS
    match schema.get("type"):
        case "string":
            return "ab" * (min(schema.get("maxLength", MOST_CHARS), 64 if depth else MOST_CHARS) // 2) or "a"
        case "array":
            items = resolved(schema.get("items", {"type": "integer"}), document)
            count = min(schema.get("maxItems", few), few)
            if items.get("type") == "integer":  # token ids, each of which the vocabulary has
                return [3 + number % (wide_model.VOCAB - 3) for number in range(count)]
            each = largest(items, document, depth + 1)
            return None if each is None else [each] * count
        case "object" if depth < 3:
            found = {name: largest(one, document, depth + 1) for name, one in schema.get("properties", {}).items()}
            found = {name: value for name, value in found.items() if name in schema.get("required", ())}
            more = schema.get("additionalProperties")
            if isinstance(more, dict) and more:
                value = largest(more, document, depth + 1)
                found |= {str(number): value for number in range(3, 3 + min(schema.get("maxProperties", few), few))}
            elif more and not found:
                found = {f"name{number}": 1 for number in range(few)}
            return found
        case "integer":
            return min(schema.get("maximum", 1 << 31), 1 << 31)
        case "number":
            return schema.get("maximum", 1e6)
        case "boolean":
            return True
    return None


def size(value: Any) -> int:
    """Returns about how many bytes a value has in JSON."""
    if isinstance(value, list):
        return len(value) * (1 + size(value[0])) if value else 2
    if isinstance(value, dict):
        return len(value) * (8 + size(next(iter(value.values())))) if value else 2
    return len(value) if isinstance(value, str) else 4


def drive(server: Server, only: str, *, attacks: bool = True, of_fields: bool = True) -> list[Row]:
    rows: list[Row] = []
    with watching(server) as watch:
        other = OtherStream(server.url)
        try:
            document = httpx.get(server.url + "/openapi.json", headers=SENDER, timeout=TIMEOUT_S).json()
            cases = [*(ATTACKS if attacks else ()), *(fields(document) if of_fields else ())]
            for case in cases:
                if only in case[0]:
                    rows.append(attempts(watch, other, *case))
                    print(line(rows[-1]), flush=True)
        finally:
            other.close()
    return rows


def keys_in(folder: Path) -> list[str]:
    """Writes KEYS into files of a folder. Returns the flags of a server that name them."""
    flags = []
    for flag, text in KEYS.items():
        file = folder / f"keys{flag}"
        file.write_text(text)
        file.chmod(0o600)
        flags += [flag, str(file)]
    return flags


def line(row: Row) -> str:
    growth = ", ".join(f"{role} {size:+.0f}" for role, size in row.growth.items() if abs(size) >= 8)
    mark = "" if row.is_fine else " **bad**"
    return (
        f"| {row.name} | {row.status} | {row.seconds:.1f} | {row.silence:.2f}{mark} | {growth} | {row.died} | "
        f"{row.answer[:120]} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.large_values", description=__doc__)
    parser.add_argument("--only", default="", help="only requests whose name contains this")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--attacks", action="store_true", help="only ATTACKS")
    kinds.add_argument("--fields", action="store_true", help="only the fields of the document")
    parser.add_argument("--model", default="", help="a checkpoint in place of the tiny one")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = asked.model or str(wide_model.save(Path(folder) / "wide"))
        print("| request | status | seconds | silence | growth, MiB | died | answer |", flush=True)
        store = ("--store", str(Path(folder) / "store.db"))  # else the routes of kept answers would not be there
        flags = ("--max-logprobs", "20", "--max-seq-len", str(CONTEXT), *store, *keys_in(Path(folder)))
        with serving(model, Path(folder) / "log", *flags) as server:
            server.headers = OTHER
            rows = drive(server, asked.only, attacks=not asked.fields, of_fields=not asked.attacks)
    bad = [row for row in rows if not row.is_fine]
    longest = max((row.silence for row in rows), default=0.0)
    lost = sum(bool(row.died) for row in rows)
    print(f"\n{len(rows)} requests, longest silence {longest:.2f} s, processes lost: {lost}, bad: {len(bad)}")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
