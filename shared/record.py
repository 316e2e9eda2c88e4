"""The format of a record of requests, which a frontend writes (`--record`) and `sluice replay` reads, line by line."""

import hashlib
import re
from pathlib import Path
from typing import Any

import msgspec

VERSION = 1


class RecordedRequest(msgspec.Struct, omit_defaults=True, gc=False):
    """One request that has ended. Times are in milliseconds, hashes are SHA-256 of little-endian 32-bit token ids.

    Choice `i` continues prompt `i // n`; `seeds`, `outputs` and `finish_reasons` have an entry for each choice.
    """

    sluice_record: int  # the version of this format
    began: str  # when the request arrived, ISO 8601
    request_id: str
    route: str
    status: int | None  # None: the client had left before a response
    outcome: str  # as in the access log
    total_ms: float
    ttft_ms: float | None = None
    error: str | None = None
    fingerprint: str = ""
    model: str = ""
    stream: bool = False
    n: int = 1
    sampling: dict[str, Any] = {}  # as used for the request; options that may contain text are left out
    prompts: list[str] = []  # hash of each prompt
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    seeds: list[int] = []
    outputs: list[str] = []  # hash of each output
    finish_reasons: list[str | None] = []
    request: Any = None  # the JSON object that the client sent; `request` and `answer` need --record-text
    answer: str = ""  # the whole body of the response as it was sent, streamed or not
    lost: int = 0  # number of lines before this line that could not be written


def older_files(path: Path) -> dict[int, Path]:
    """Returns number → file, for the older files of a record: FILE.1 is the newest of them."""
    named = re.compile(re.escape(path.name) + r"\.([1-9]\d{0,8})")
    return {int(match[1]): file for file in path.parent.iterdir() if (match := named.fullmatch(file.name))}


def hash_of(packed: bytes) -> str:
    """Returns the hash of packed token ids."""
    return hashlib.sha256(packed).hexdigest()
