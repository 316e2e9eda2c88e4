"""`python -m tests.fuzz MINUTES [URL]`: fuzzes a running server, or starts one with the demo model.

Continues after a finding, prints each distinct one, and ends with their count; the exit code is 1 if there is any.
"""

import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.server import serving
from tests.fuzz.openapi import fuzz_openapi
from tests.fuzz.raw import fuzz_bodies, fuzz_http, fuzz_sizes

EXAMPLES = 100


def main(minutes: float, url: str) -> int:
    deadline = time.monotonic() + 60 * minutes
    tally: Counter[Any] = Counter()
    findings: Counter[str] = Counter()
    parts: list[Callable[[], Counter[Any]]] = [
        lambda: fuzz_openapi(url, "m", EXAMPLES),
        lambda: fuzz_bodies(url, 5 * EXAMPLES),
        lambda: fuzz_http(url, 5 * EXAMPLES),
        lambda: fuzz_sizes(url),
    ]
    while time.monotonic() < deadline:
        for part in parts:
            try:
                tally += part()
            except (Exception, BaseExceptionGroup) as error:  # schemathesis raises groups of its own
                text = "".join(traceback.format_exception(error))[-3000:]
                findings[f"{type(error).__name__}: {str(error)[:100]}"] += 1
                print(text, flush=True)
        print(f"{tally.total()} requests, {len(findings)} findings", flush=True)
    for kind, count in sorted(tally.items(), key=str):
        print(*kind, count)
    print(httpx.get(f"{url}/stats").text)
    print(f"{tally.total()} requests; findings: {dict(findings)}")
    return 1 if findings else 0


if __name__ == "__main__":
    length = float(sys.argv[1])
    if len(sys.argv) > 2:
        sys.exit(main(length, sys.argv[2]))
    with tempfile.TemporaryDirectory() as folder, serving("demo", Path(folder) / "log") as server:
        code = main(length, server.url)
        server.until_idle()
    sys.exit(code)
