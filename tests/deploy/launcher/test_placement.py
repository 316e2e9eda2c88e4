"""Dividing a machine among several workers."""

import pytest

from deploy.launcher.placement import addresses, place_workers
from shared.config.check import check
from shared.config.declaration import ConfigError
from shared.config.settings import Settings, with_values


def settings_with(**values: object) -> Settings:
    return check(with_values(Settings(), {"run_dir": "/run/s", **values}))


def same_port(port: int) -> int:
    return port


def test_single_worker_gets_everything_as_set() -> None:
    settings = settings_with(threads=7)
    [placement] = place_workers(settings, ["0", "1"], same_port)
    assert (placement.name, placement.heartbeat, placement.settings, placement.environment) == (
        "worker",
        "worker.heartbeat",
        settings,
        {},
    )
    assert addresses(settings) == ""
    assert addresses(settings_with(workers_file="f")) == "ipc:///run/s"


def test_workers_on_the_cpu_divide_threads_and_memory() -> None:
    settings = settings_with(workers=3, threads=7, worker_metrics_port=9000)
    placements = place_workers(settings, [], same_port)
    assert [placement.settings.worker.threads for placement in placements] == [2, 2, 2]
    assert [placement.settings.worker.worker_metrics_port for placement in placements] == [9000, 9001, 9002]
    [memory] = {placement.settings.worker.kv_cache_gb for placement in placements}
    assert memory > 0
    assert [f"ipc://{placement.settings.wire.run_dir}" for placement in placements] == addresses(settings).split(",")
    assert len({placement.heartbeat for placement in placements}) == 3 and not any(
        placement.environment for placement in placements
    )
    second = place_workers(settings_with(workers=2, kv_cache_gb=1.5, worker_metrics_port=0), [], same_port)[
        1
    ].settings.worker
    assert (second.kv_cache_gb, second.worker_metrics_port) == (1.5, 0)


def test_prefill_workers_come_after_those_that_generate() -> None:
    settings = settings_with(workers=1, prefill_workers=2, threads=8, worker_metrics_port=9000)
    placements = place_workers(settings, [], same_port)
    assert [one.name for one in placements] == ["worker 0", "prefill 1", "prefill 2"]
    assert [one.settings.worker.role for one in placements] == ["decode", "prefill", "prefill"]
    assert [one.settings.worker.threads for one in placements] == [2, 2, 2]
    assert [one.settings.worker.worker_metrics_port for one in placements] == [9000, 9001, 9002]
    assert [f"ipc://{one.settings.wire.run_dir}" for one in placements] == addresses(settings).split(",")
    elsewhere = settings_with(workers=0, prefill_workers=1, kv_store="/kv", workers_file="f")
    [only] = place_workers(elsewhere, [], same_port)
    assert only.settings.worker.role == "prefill" and addresses(elsewhere) == f"ipc://{only.settings.wire.run_dir}"
    with pytest.raises(ConfigError, match="--workers 1 with --prefill-workers 2 needs one GPU per worker"):
        place_workers(settings, ["0", "1"], same_port)
    with_gpus = place_workers(settings, ["0", "1", "2"], same_port)
    assert [one.environment["CUDA_VISIBLE_DEVICES"] for one in with_gpus] == ["0", "1", "2"]
    assert {one.settings.worker.role for one in place_workers(settings_with(workers=2), [], same_port)} == {"both"}


def test_worker_publishes_its_pages_on_its_own_port() -> None:
    endpoints = {"kv_events_endpoint": "tcp://*:5557", "kv_events_replay_endpoint": "tcp://[::]:5657"}
    placements = place_workers(settings_with(workers=3, **endpoints), [], same_port)
    given = [placement.settings.worker for placement in placements]
    assert [one.kv_events_endpoint for one in given] == ["tcp://*:5557", "tcp://*:5558", "tcp://*:5559"]
    assert [one.kv_events_replay_endpoint for one in given] == [f"tcp://[::]:{port}" for port in (5657, 5658, 5659)]
    assert not place_workers(settings_with(workers=2), [], same_port)[1].settings.worker.kv_events_endpoint


def test_each_worker_gets_its_own_gpu() -> None:
    placements = place_workers(settings_with(workers=2), ["GPU-a", "5", "6"], same_port)
    assert [placement.environment for placement in placements] == [
        {"CUDA_VISIBLE_DEVICES": "GPU-a"},
        {"CUDA_VISIBLE_DEVICES": "5"},
    ]
    assert {placement.settings.worker.kv_cache_gb for placement in placements} == {0.0}
    assert not place_workers(settings_with(workers=2, device="cpu"), ["0"], same_port)[0].environment
    with pytest.raises(ConfigError, match="--workers 3 needs one GPU per worker, but there are 2"):
        place_workers(settings_with(workers=3), ["0", "1"], same_port)
    with pytest.raises(ConfigError, match="--workers 2 needs one GPU per worker, but there are 0"):
        place_workers(settings_with(workers=2, device="cuda"), [], same_port)


def test_a_worker_of_several_processes_gets_a_gpu_for_each() -> None:
    settings = settings_with(workers=2, tensor_parallel_size=2)
    placements = place_workers(settings, ["0", "1", "2", "3"], same_port)
    assert [one.environment["CUDA_VISIBLE_DEVICES"] for one in placements] == ["0,1", "2,3"]
    with pytest.raises(ConfigError, match="--workers 2 needs 2 GPUs per worker, but there are 3"):
        place_workers(settings, ["0", "1", "2"], same_port)


def test_external_addresses_come_after_own() -> None:
    external = "tcp://a:5700,tcp://b:5700"
    assert addresses(settings_with(worker_addresses=external, insecure=True)) == f"ipc:///run/s,{external}"
    assert addresses(settings_with(workers=0, worker_addresses=external, insecure=True)) == external
    assert place_workers(settings_with(workers=0, workers_file="f"), [], same_port) == []
    with pytest.raises(ConfigError, match="--run-dir"):
        place_workers(settings_with(workers=2, run_dir="/run/a b"), [], same_port)
