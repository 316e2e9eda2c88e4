"""A server whose worker is a pipeline of processes gives one process's bytes, and survives the death of any process."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.checkpoints import Checkpoints
from tests.e2e.broken_rank import WEIGHTS
from tests.e2e.server import ROOT, Server, free_port, serving
from tests.e2e.test_ranks import FLAGS, PROMPT, TOKENS, answers, expected
from tests.patience import PATIENCE_S

__all__ = ["expected"]  # a fixture

CHAT = {"model": "m", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 40, "seed": 3, "receipt": True}


def processes(server: Server, count: int) -> list[dict[str, int]]:
    stats = server.until(lambda stats: stats["workers"][0]["ready"] and len(stats["workers"][0]["ranks"]) == count)
    ranks: list[dict[str, int]] = stats["workers"][0]["ranks"]
    return ranks


def receipt(server: Server) -> dict[str, Any]:
    found: dict[str, Any] = server.client.post("/v1/chat/completions", json=CHAT).json()["choices"][0]["receipt"]
    return found


@pytest.fixture(scope="module")
def stages(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("stages") / "log"
    with serving(checkpoints("llama"), log, *FLAGS, "--pipeline-parallel-size", "3", held=True) as server:
        yield server


def test_stages_give_the_bytes_of_one_process(stages: Server, expected: list[list[int]]) -> None:
    assert answers(stages) == expected
    assert answers(stages) == expected, "now their prompts are in the prefix cache"
    ranks = processes(stages, 3)
    assert [(one["rank"], one["stage"]) for one in ranks] == [(0, 0), (1, 1), (2, 2)]
    assert len({one["pid"] for one in ranks}) == 3


@pytest.mark.parametrize(
    ("rank", "number"),
    [(0, signal.SIGKILL), (1, signal.SIGKILL), (2, signal.SIGKILL), (1, signal.SIGSTOP), (2, signal.SIGSTOP)],
)
def test_streams_go_on_when_a_stage_dies_or_stops(
    stages: Server, expected: list[list[int]], rank: int, number: signal.Signals
) -> None:
    before = [one["pid"] for one in processes(stages, 3)]
    with ThreadPoolExecutor(1) as pool, stages.hold.at(TOKENS // 2):
        running = pool.submit(answers, stages)
        stages.hold.wait()
        os.kill(before[rank], number)
        stages.hold.release()
        assert running.result() == expected
    assert not {*before} & {one["pid"] for one in processes(stages, 3)}
    stages.until(lambda _: not [pid for pid in before if Path(f"/proc/{pid}").exists()])


def test_stage_with_other_weights_is_found_before_it_serves(stages: Server, expected: list[list[int]]) -> None:
    before = [one["pid"] for one in processes(stages, 3)]
    stages.hold.flip.write_text(WEIGHTS)
    os.kill(before[0], signal.SIGKILL)
    assert answers(stages) == expected
    assert re.search(r"rank ([12]) has other weights in layers\.\1\.", stages.log.read_text())


@pytest.mark.parametrize(
    ("kind", "stages", "lanes", "formats"),
    [
        ("gemma3", 3, 1, ("--kv-cache-dtype", "int4")),
        ("qwen3_5", 3, 1, ()),
        ("qwen2-moe", 2, 1, ("--quantization", "int4-g32", "--dtype", "bfloat16")),
        ("qwen3_5", 2, 2, ()),
        ("gemma4-inputs", 3, 1, ()),
    ],
)
def test_every_kind_of_model_gives_the_bytes_of_one_process(
    checkpoints: Checkpoints, tmp_path: Path, kind: str, stages: int, lanes: int, formats: tuple[str, ...]
) -> None:
    """Models have several groups of layers, or recurrent states. A receipt from one process also verifies on stages."""
    model, alone = checkpoints(kind), ("--speculation", "ngram", "--kv-cache-gb", "0.05", *formats)
    with serving(model, tmp_path / "one", *alone) as server:
        expected, made = answers(server), receipt(server)
    others = ("--pipeline-parallel-size", str(stages), "--tensor-parallel-size", str(lanes))
    with serving(model, tmp_path / "stages", *alone, *others) as server:
        assert answers(server) == expected
        assert receipt(server) | {"created": 0} == made | {"created": 0}
        sent = {"receipt": made, "request": CHAT}
        verdict = server.client.post("/v1/receipts/verify", json=sent).json()
        assert verdict["identical"] and verdict["fingerprint_matches"], verdict
        ranks = processes(server, stages * lanes)
        assert [one["stage"] for one in ranks] == [rank // lanes for rank in range(len(ranks))]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("llama", "--pipeline-parallel-size 4 is more than the model's 3 layers"),
        ("gemma4", "--pipeline-parallel-size 4: this model can be cut into 2 stages at most"),
    ],
)
def test_what_cannot_be_cut_ends_the_start_with_one_sentence(checkpoints: Checkpoints, kind: str, words: str) -> None:
    command = [sys.executable, "-m", "deploy.cli.main", "serve", "--port", str(free_port()), "--model"]
    command += [str(checkpoints(kind)), "--worker-metrics-port", "0", "--pipeline-parallel-size", "4"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert words in ended.stdout + ended.stderr


@pytest.mark.parametrize(("stages", "lanes"), [(1, 2), (3, 1), (2, 2)])
def test_all_ranks_together_count_the_rows_of_each_expert_as_one_process(
    checkpoints: Checkpoints, tmp_path: Path, stages: int, lanes: int
) -> None:
    model = checkpoints("qwen3-moe")
    ports = free_port(), free_port()
    flags = (*FLAGS, "--expert-metrics", "--canary-interval", "0")
    several = ("--pipeline-parallel-size", str(stages), "--tensor-parallel-size", str(lanes))
    with serving(model, tmp_path / "one", *flags, "--worker-metrics-port", str(ports[0])) as server:
        receipt(server)
        expected = counts(ports[0])
    assert sum(expected.values()) > 0 and {layer for _, layer in expected} == {"0", "2"}  # layer 1 has an MLP
    with serving(model, tmp_path / "ranks", *flags, *several, "--worker-metrics-port", str(ports[1])) as server:
        receipt(server)
        assert counts(ports[1]) == expected


def counts(port: int) -> dict[tuple[str, str], float]:
    """Returns how many rows chose each expert of each layer, by expert and layer."""
    text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S).text
    found = re.findall(r'expert_rows_total\{expert="(\d+)",layer="(\d+)".*\} (.+)', text)
    return {(expert, layer): float(value) for expert, layer, value in found}
