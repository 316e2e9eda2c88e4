"""Every mode, selected by flags, gives the default mode's text.

The refusal of two contradicting flags names both flags.
"""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.server import ROOT, Events, Server, serving
from tests.patience import PATIENCE_S

MODES = {
    "static": "--batching-mode static --batch-wait-timeout-s 0.01",
    "contiguous": "--kv-cache-backend contiguous --scheduler-policy prefill_first",
    "unchunked": "--no-use-chunked-prefill --page-size 1 --no-prefix-cache",
    "tight": "--prefill-chunk-size 5 --max-prefill-chunks-per-step 1 --max-step-tokens 16 --page-size 64 "
    "--scheduler-policy decode_round_robin --max-batch-size 4 --kv-cache-gb 0.004 --max-seq-len 512",
}


def answers(server: Server) -> list[Events]:
    def ask(i: int) -> Events:
        prompt = "Once upon a time there was a little dog. " * (1 + i % 3) + "It"
        return server.events(prompt, 40, seed=i, temperature=0.7, ignore_eos=True)

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(ask, range(8)))


@pytest.fixture(scope="module")
def default(demo: Server) -> list[Events]:
    return answers(demo)


@pytest.mark.parametrize("flags", MODES.values(), ids=MODES)
def test_mode_with_any_flags_gives_default_text(default: list[Events], flags: str, tmp_path: Path) -> None:
    with serving("demo", tmp_path / "log", *flags.split()) as server:
        told = answers(server)
        server.until_idle()
    assert told == default


@pytest.mark.parametrize(
    "flags",
    [
        "--batching-mode static --use-chunked-prefill",
        "--kv-cache-backend contiguous --prefix-cache",
        "--kv-cache-backend contiguous --page-size 16",
        "--no-use-chunked-prefill --max-prefill-chunks-per-step 2",
        "--max-step-tokens 8 --prefill-chunk-size 64",
    ],
)
def test_flags_contradicting_are_refused_and_both_named(flags: str) -> None:
    command = [sys.executable, "-m", "deploy.cli.main", "serve", *flags.split()]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert ended.returncode == 2
    words = [word for word in flags.split() if word.startswith("--")]
    assert all(word.replace("--no-", "--") in ended.stderr.replace("--no-", "--") for word in words), ended.stderr
