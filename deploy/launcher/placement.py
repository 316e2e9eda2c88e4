"""Divides a machine among several workers: GPUs, threads, memory, ports and folders.

Knows settings; starts nothing. A single worker gets the whole machine, as the settings say.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shared.address import with_port_offset
from shared.config.declaration import ConfigError
from shared.config.settings import Settings, with_values
from shared.machine import CPU_SHARE, available_bytes, usable_cores

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class WorkerPlacement:
    """One worker's share of the machine."""

    name: str
    heartbeat: str  # file name in the run folder; begins with "worker", see worker/engine/crash_journal.py
    settings: Settings
    environment: dict[str, str]


def place_workers(settings: Settings, gpus: Sequence[str], free_port: Callable[[int], int]) -> list[WorkerPlacement]:
    """Divides the machine among the workers of `settings`, which must name a run folder.

    gpus: devices as in CUDA_VISIBLE_DEVICES.
    free_port: returns the given port, or another one if it is taken.
    Raises ConfigError if there are too few GPUs.
    """
    count, port = settings.launch.processes, settings.worker.worker_metrics_port
    if count == settings.launch.workers == 1:
        own = with_values(settings, {"worker_metrics_port": free_port(port) if port else 0})
        return [WorkerPlacement("worker", "worker.heartbeat", own, {})]
    if not count:
        return []
    devices, each = [] if settings.worker.device == "cpu" else list(gpus), settings.worker.ranks
    if len(devices) < count * each and (devices or settings.worker.device == "cuda"):
        needs = "one GPU" if each == 1 else f"{each} GPUs"
        raise ConfigError(
            f"{_asked(settings)} needs {needs} per worker, but there are {len(devices)}; or use --device cpu"
        )
    if set(settings.wire.run_dir) & set(", \t\n"):
        raise ConfigError(
            f"--run-dir {settings.wire.run_dir!r} must not contain a comma or space with several --workers"
        )
    shared = _divide(settings, count, on_cpu=not devices)
    return [
        WorkerPlacement(
            f"{'prefill' if i >= settings.launch.workers else 'worker'} {i}",
            f"worker-{i}.heartbeat",
            with_values(
                shared,
                {
                    "run_dir": str(folder(settings, i)),
                    "worker_metrics_port": free_port(port + i) if port else 0,
                    **_role(settings, i),
                    **_kv_events(settings, i),
                },
            ),
            {"CUDA_VISIBLE_DEVICES": ",".join(devices[i * each : (i + 1) * each])} if devices else {},
        )
        for i in range(count)
    ]


def _asked(settings: Settings) -> str:
    """Returns the flags that say how many workers there are."""
    launch = settings.launch
    more = f" with --prefill-workers {launch.prefill_workers}" if launch.prefill_workers else ""
    return f"--workers {launch.workers}{more}"


def _role(settings: Settings, index: int) -> dict[str, str]:
    """Returns the role of worker `index`: those of --prefill-workers come after the workers that generate."""
    if not settings.launch.prefill_workers:
        return {}
    return {"role": "decode" if index < settings.launch.workers else "prefill"}


def folder(settings: Settings, index: int) -> Path:
    """Returns the folder with the sockets of worker `index` of several workers."""
    return Path(settings.wire.run_dir) / f"w{index}"


def addresses(settings: Settings) -> str:
    """Returns --worker-addresses for the frontends: this server's workers, then external workers.

    The list is empty if there is only a single worker under --run-dir.
    """
    external, count = settings.frontend.worker_addresses, settings.launch.processes
    if count == settings.launch.workers == 1:
        has_external = external or settings.frontend.workers_file
        own = [f"ipc://{settings.wire.run_dir}"] if has_external else []
    else:
        own = [f"ipc://{folder(settings, i)}" for i in range(count)]
    return ",".join([*own, *([external] if external else [])])


def _kv_events(settings: Settings, index: int) -> dict[str, str]:
    """Returns the addresses on which worker `index` publishes the K/V events of its prefix cache."""
    names = ("kv_events_endpoint", "kv_events_replay_endpoint")
    given = {name: getattr(settings.worker, name) for name in names}
    return {name: with_port_offset(endpoint, index) for name, endpoint in given.items() if endpoint}


def _divide(settings: Settings, count: int, *, on_cpu: bool) -> Settings:
    """Divides threads, and on the CPU memory, equally, so that all workers can hold sequences of the same length."""
    worker = settings.worker
    values: dict[str, object] = {"threads": max(1, (worker.threads or usable_cores()) // count)}
    if on_cpu and not worker.kv_cache_gb:
        values["kv_cache_gb"] = round(CPU_SHARE * available_bytes() / count / GIB, 2)
    return with_values(settings, values)
