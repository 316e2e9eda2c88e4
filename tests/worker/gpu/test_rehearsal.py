"""A worker on a fake GPU, from loading to serving; the fake GPU notices what would be an error on a real GPU."""

import os
import re
import subprocess
import sys
from datetime import date

import pytest
import torch
from torch import Tensor

from bench.gpu.offline.cuda import gpu
from bench.gpu.offline.machine import Machine
from bench.gpu.offline.rehearsals import DRAFTERS

CUDA = torch.device("cuda")
WORKERS = [  # model and ways; how many workers that is, and how many of these have adapters and graphs
    (("gpt-oss-20b", "int4"), 1, 0),
    (("tiny", "plain", "int8-dynamic"), 2, 1),
    (("tiny", *DRAFTERS), 3, 3),
]
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the fake GPU runs only where there is none")


def test_fake_gpu_refuses_a_machine_with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RuntimeError, match="only on machines without CUDA"), gpu():
        pass


def test_classes_are_replaced_by_classes() -> None:
    """Libraries have annotations such as `torch.cuda.Stream | None`, which only classes allow."""
    before = dict(vars(torch.cuda))
    with gpu():
        replaced = {name: now for name, now in vars(torch.cuda).items() if now is not before.get(name)}
    classes = {name for name in replaced if isinstance(before.get(name), type)}  # others are imported meanwhile
    assert classes == {"CUDAGraph", "Event", "Stream", "graph"}
    assert all(isinstance(replaced[name], type) for name in classes)


def rehearsed(module: str, *words: str) -> str:
    plain = {
        name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES")
    }
    command = [sys.executable, "-m", module, *words]
    done = subprocess.run(command, env=plain, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_bench_runs_to_its_end() -> None:
    assert "ablations gemma-3-1b" in rehearsed("tests.bench.gpu.rehearsal")


@pytest.mark.slow
def test_a_worker_serves_and_compiles_nothing_meanwhile() -> None:
    """One worker a day. To rehearse other models and settings: `python -m tests.worker.gpu.rehearsal [MODEL] [WAY]`."""
    words, count, recorded = WORKERS[date.today().toordinal() // 2 % len(WORKERS)]  # each other day: see TURNS
    served = rehearsed("tests.worker.gpu.rehearsal", *words)
    lines = [line for line in served.splitlines() if "compiled at" in line]
    found = [bool(re.search(r"with adapters [1-9]\d* recorded, 0 steps without graphs", line)) for line in lines]
    assert sum(found) == recorded, served
    assert [line.count("later 0; ") for line in lines] == [line.count(" and 0; ") for line in lines] == [1] * count


def pinned(*values: int) -> Tensor:
    return torch.tensor(values).pin_memory()


def test_host_memory_must_stay_until_it_was_waited_for() -> None:
    with gpu() as machine:
        source, into, event = pinned(1, 2, 3), torch.zeros(3, dtype=torch.int64, device=CUDA), torch.cuda.Event()
        into.copy_(source, non_blocking=True)
        event.record()  # type: ignore[no-untyped-call]
        event.synchronize()
        source[0] = 9
        into.copy_(source, non_blocking=True)
        assert not machine.findings
        source[0] = 10
        torch.cuda.synchronize()
    (found,) = machine.findings
    assert found.startswith("host memory was written under the copy")


def test_what_comes_from_the_device_is_there_only_after_the_wait() -> None:
    with gpu() as machine:
        there, here = torch.zeros(3, dtype=torch.int64, device=CUDA), pinned(1, 2, 3)
        here.copy_(there, non_blocking=True)
        assert not machine.waits and 0 not in here.tolist()
        torch.cuda.synchronize()
        assert here.tolist() == [0, 0, 0] and machine.waits.total() == 1


def test_launches_are_counted_and_views_are_not() -> None:
    with gpu() as machine:
        value = torch.empty(4, 6, device=CUDA)
        (value.view(24)[2:].t() + 1).copy_(torch.zeros(22, device=CUDA))
    assert machine.launched == {"aten::add": 1, "aten::copy_": 1, "aten::zeros": 1}


def waits(machine: Machine, value: Tensor) -> object:
    return value.sum().item()


def copies(machine: Machine, value: Tensor) -> object:
    return value.copy_(pinned(1, 2, 3), non_blocking=True)


def records(machine: Machine, value: Tensor) -> object:
    return torch.cuda.Event().record()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("forbidden", [waits, copies, records])
def test_a_recording_notices_what_it_may_not_hold(forbidden: object) -> None:
    with gpu() as machine:
        value = torch.zeros(3, dtype=torch.int64, device=CUDA)
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            value.add_(1)
            assert not machine.findings
            forbidden(machine, value)  # type: ignore[operator]
    assert "recording" in machine.findings[0]


def test_devices_do_not_mix() -> None:
    with gpu(), pytest.raises(RuntimeError, match=r"same device|different devices"):
        torch.zeros(3, device=CUDA) + torch.zeros(3)


def test_a_replay_notices_memory_that_was_given_back() -> None:
    with gpu() as machine:
        value, lost, graph = torch.zeros(3, device=CUDA), torch.zeros(3, device=CUDA), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            lost.copy_(value + 1)
        graph.replay()
        assert not machine.findings, "what was made while recording is the recording's own"
        del lost
        graph.replay()
    (found,) = machine.findings
    assert found.startswith("a replay uses 1 of 2 tensors after their end")
