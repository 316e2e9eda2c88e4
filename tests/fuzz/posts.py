"""Posts JSON bodies to a server, and checks the answers of every route and format alike."""

import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from tests.fuzz.fuzzer import HANG_S, Attempt, Failure, Input
from tests.fuzz.watch import Watch

ANSWERED = range(200, 500)
DOCUMENTED = (501, 503, 504)  # 501: the model cannot do it, for example /infill without fill-in-the-middle tokens


@contextmanager
def posting(watch: Watch, patience_s: float = HANG_S) -> Iterator[Attempt]:
    """Yields a function that posts the `body` of an input (text in Latin-1) to its `path`, on one connection."""
    there = urlsplit(watch.url)
    wire = http.client.HTTPConnection(str(there.hostname), there.port, timeout=patience_s + 1)

    def attempt(input: Input) -> None:
        headers = {"Content-Type": "application/json", "anthropic-version": "2023-06-01"}
        try:
            wire.request("POST", input["path"], input["body"].encode("latin-1"), headers)
            response = wire.getresponse()
            data = response.read()
        except TimeoutError:
            wire.close()
            raise
        except (OSError, http.client.HTTPException) as error:
            wire.close()
            raise Failure(f"no HTTP answer: {error!r}") from None
        check(response.status, response.headers.get_content_type(), data)

    try:
        yield attempt
    finally:
        wire.close()


def check(status: int, kind: str, data: bytes) -> None:
    """Raises Failure if an answer is a server error, or is neither JSON nor a whole stream."""
    if status not in ANSWERED and status not in DOCUMENTED:
        raise Failure(f"status {status}: {data[:300]!r}")
    try:
        text = data.decode()
        if kind == "application/json":
            answer = json.loads(text)
            if status >= 400 and not {"error", "message"} & answer.keys():  # `message`: Cohere's form
                raise Failure(f"an error of status {status} without `error`: {text[:300]}")
        elif kind == "text/event-stream":
            if not text.endswith("\n\n"):
                raise Failure(f"a stream is cut off: {text[-200:]!r}")
            for line in text.split("\n"):
                if line.startswith("data: {"):
                    json.loads(line[6:])
        elif kind == "application/x-ndjson":
            for line in text.splitlines():
                json.loads(line)
    except ValueError as error:
        raise Failure(f"no {kind}: {error}: {data[:300]!r}") from None
