"""A server whose worker is several processes, with drafts of a model: the bytes of one process without drafts."""

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import VOCAB
from tests.e2e.server import Server, serving
from tests.e2e.test_drafts import BODIES, STORY, Headed, ask, ask_until_drafted, headed
from tests.worker.spec_decode.eagle_heads import EAGLES

__all__ = ["headed"]  # a fixture

# a random head never guesses right; a bias leaves few tokens to choose from, so that some guesses are right
FEW = dict.fromkeys(sorted(EAGLES["recurrent"].target_ids(VOCAB).tolist())[9:13], 40)
ASKED: list[dict[str, Any]] = [{**body, "logit_bias": FEW, "temperature": 1.5} for body in BODIES[2:6]]


@pytest.mark.parametrize("several", ["--tensor-parallel-size", "--pipeline-parallel-size"])
@pytest.mark.parametrize("method", ["mtp", "eagle3"])
def test_drafts_change_no_byte_also_when_a_rank_is_killed(
    method: str, several: str, headed: Headed, tmp_path: Path
) -> None:
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": 3}
    if method == "eagle3":
        config["model"] = str(headed.eagle)
    flags = ("--speculative-config", json.dumps(config), several, "2", "--stall-timeout", "5")
    with serving(headed.folder, tmp_path / "log", *flags, held=True) as on, ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda body: ask(on, body), ASKED)) == [ask(headed.off, body) for body in ASKED]
        ask_until_drafted(on, ASKED[0], 0)
        check_killed_rank(on, headed.off)


def check_killed_rank(on: Server, off: Server) -> None:
    options = {"temperature": 0.9, "seed": 5, "ignore_eos": True, "logit_bias": FEW}
    other = on.stats()["workers"][0]["ranks"][1]["pid"]
    with ThreadPoolExecutor(1) as pool, on.hold.at(30):
        stream = pool.submit(on.events, STORY, 60, **options)
        on.hold.wait()
        os.kill(other, signal.SIGKILL)
        on.hold.release()
        assert stream.result() == off.events(STORY, 60, **options)
