"""A server with --activations int8: the same bytes alone, in company and after its worker is killed, and a fingerprint
of its own."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.server import Server, serving
from tests.patience import PATIENCE_S

LENGTH = 60
PROMPTS = [[20 + number, 30, 40, *range(50, 50 + 9 * number)] for number in range(5)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("int8") / "log"
    with serving("demo", log, "--quantization", "int4-g32", "--activations", "int8", held=True) as started:
        yield started


def asked(server: Server, prompt: list[int]) -> list[int]:
    events = server.events(prompt, LENGTH, ignore_eos=True, temperature=0.8, seed=7)
    assert events.error is None
    return events.ids


def test_bytes_are_the_same_in_company_and_after_a_kill(server: Server, demo: Server) -> None:
    alone = [asked(server, prompt) for prompt in PROMPTS]
    epoch = server.stats()["worker"]["epoch"]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        assert list(pool.map(asked, [server] * len(PROMPTS), PROMPTS)) == alone
        with server.hold.at(LENGTH // 2):
            streams = [pool.submit(asked, server, prompt) for prompt in PROMPTS]
            server.until(lambda stats: stats["running"] + stats["waiting"] == len(PROMPTS))
            os.kill(server.stats()["worker"]["pid"], signal.SIGKILL)
        assert [stream.result(PATIENCE_S) for stream in streams] == alone
    stats = server.until_idle()
    assert stats["worker"]["epoch"] == epoch + 1
    assert stats["worker"]["dtype"].endswith("int4-g32 weights, int8 activations")
    assert stats["fingerprint"] not in ("", demo.stats()["fingerprint"])
    assert server.log.read_text().count("so are their inputs, to int8 with one scale per 32") == 2
