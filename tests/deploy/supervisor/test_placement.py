"""How several workers share one machine."""

import pytest

from deploy.supervisor.placement import addresses, place_workers
from shared.config import ConfigError, Settings, with_values
from shared.settings_check import check


def given(**values: object) -> Settings:
    return check(with_values(Settings(), {"run_dir": "/run/s", **values}))


def same(port: int) -> int:
    return port


def test_one_worker_gets_everything_as_it_was_asked_for() -> None:
    settings = given(threads=7)
    [place] = place_workers(settings, ["0", "1"], same)
    assert (place.name, place.heartbeat, place.settings, place.environment) == (
        "worker",
        "worker.heartbeat",
        settings,
        {},
    )
    assert addresses(settings) == ""
    assert addresses(given(workers_file="f")) == "ipc:///run/s"


def test_on_the_cpu_threads_and_memory_are_shared_out() -> None:
    settings = given(workers=3, threads=7, worker_metrics_port=9000)
    places = place_workers(settings, [], same)
    assert [place.settings.worker.threads for place in places] == [2, 2, 2]
    assert [place.settings.worker.worker_metrics_port for place in places] == [9000, 9001, 9002]
    [memory] = {place.settings.worker.kv_cache_gb for place in places}
    assert memory > 0
    assert [f"ipc://{place.settings.wire.run_dir}" for place in places] == addresses(settings).split(",")
    assert len({place.heartbeat for place in places}) == 3 and not any(place.environment for place in places)
    second = place_workers(given(workers=2, kv_cache_gb=1.5, worker_metrics_port=0), [], same)[1].settings.worker
    assert (second.kv_cache_gb, second.worker_metrics_port) == (1.5, 0)


def test_each_gets_a_gpu_of_its_own() -> None:
    places = place_workers(given(workers=2), ["GPU-a", "5", "6"], same)
    assert [place.environment for place in places] == [{"CUDA_VISIBLE_DEVICES": "GPU-a"}, {"CUDA_VISIBLE_DEVICES": "5"}]
    assert {place.settings.worker.kv_cache_gb for place in places} == {0.0}
    assert not place_workers(given(workers=2, device="cpu"), ["0"], same)[0].environment
    with pytest.raises(ConfigError, match="--workers 3 needs one GPU per worker, but there are 2"):
        place_workers(given(workers=3), ["0", "1"], same)
    with pytest.raises(ConfigError, match="--workers 2 needs one GPU per worker, but there are 0"):
        place_workers(given(workers=2, device="cuda"), [], same)


def test_workers_elsewhere_come_after_ours() -> None:
    far = "tcp://a:5700,tcp://b:5700"
    assert addresses(given(worker_addresses=far, insecure=True)) == f"ipc:///run/s,{far}"
    assert addresses(given(workers=0, worker_addresses=far, insecure=True)) == far
    assert place_workers(given(workers=0, workers_file="f"), [], same) == []
    with pytest.raises(ConfigError, match="--run-dir"):
        place_workers(given(workers=2, run_dir="/run/a b"), [], same)
