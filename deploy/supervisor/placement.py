"""How several workers share a machine: who gets which GPU, how many threads, how much memory, which port and folder.

Knows settings; starts nothing. A single worker gets everything as it was asked for.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shared.config import ConfigError, Settings, with_values
from shared.machine import CPU_SHARE, available_bytes, usable_cores

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class WorkerPlacement:
    """One worker's share."""

    name: str
    heartbeat: str  # file in the run folder; all begin with "worker", see worker/engine/crash_journal.py
    settings: Settings
    environment: dict[str, str]


def place_workers(settings: Settings, gpus: Sequence[str], free_port: Callable[[int], int]) -> list[WorkerPlacement]:
    """The workers that `settings` ask for, in a run folder that they name.

    `gpus` are words for CUDA_VISIBLE_DEVICES; `free_port(port)` is that port, or another if it is taken.
    Raises ConfigError when there are GPUs, but too few, or none that are asked for.
    """
    count, port = settings.launch.workers, settings.worker.worker_metrics_port
    if count == 1:
        own = with_values(settings, {"worker_metrics_port": free_port(port) if port else 0})
        return [WorkerPlacement("worker", "worker.heartbeat", own, {})]
    if not count:
        return []
    devices = [] if settings.worker.device == "cpu" else list(gpus)
    if len(devices) < count and (devices or settings.worker.device == "cuda"):
        raise ConfigError(f"--workers {count} needs a GPU each, and there are {len(devices)}; or --device cpu")
    if set(settings.wire.run_dir) & set(", \t\n"):
        raise ConfigError(f"--run-dir {settings.wire.run_dir!r} must have no comma or space with several --workers")
    shared = _share(settings, count, on_cpu=not devices)
    return [
        WorkerPlacement(
            f"worker {i}",
            f"worker-{i}.heartbeat",
            with_values(
                shared,
                {"run_dir": str(folder(settings, i)), "worker_metrics_port": free_port(port + i) if port else 0},
            ),
            {"CUDA_VISIBLE_DEVICES": devices[i]} if devices else {},
        )
        for i in range(count)
    ]


def folder(settings: Settings, index: int) -> Path:
    """Where worker `index` of several has its sockets."""
    return Path(settings.wire.run_dir) / f"w{index}"


def addresses(settings: Settings) -> str:
    """For the frontends: all workers, ours first; empty when there is only the one under --run-dir."""
    elsewhere, count = settings.frontend.worker_addresses, settings.launch.workers
    if count == 1:
        several = elsewhere or settings.frontend.workers_file
        ours = [f"ipc://{settings.wire.run_dir}"] if several else []
    else:
        ours = [f"ipc://{folder(settings, i)}" for i in range(count)]
    return ",".join([*ours, *([elsewhere] if elsewhere else [])])


def _share(settings: Settings, count: int, *, on_cpu: bool) -> Settings:
    """Equal parts: of the threads, and on the CPU of the memory, so that all can hold sequences equally long."""
    worker = settings.worker
    values: dict[str, object] = {"threads": max(1, (worker.threads or usable_cores()) // count)}
    if on_cpu and not worker.kv_cache_gb:
        values["kv_cache_gb"] = round(CPU_SHARE * available_bytes() / count / GIB, 2)
    return with_values(settings, values)
