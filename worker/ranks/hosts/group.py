"""Reads the rank of this process from the environment variables that torchrun or LeaderWorkerSet sets."""

from collections.abc import Mapping
from dataclasses import dataclass

from shared.config import ConfigError, WorkerConfig

PORT = 5557  # the port of rank 0, if no flag or variable names one; rank N listens on this port + N
LAST_PORT = 65535
MOST = 128  # ranks


@dataclass(frozen=True, slots=True)
class Group:
    """The group of all ranks of a worker. leader, port: the address of rank 0; rank N listens on port + N.

    here: how many ranks are on this machine; place: the index of this rank among them.
    """

    rank: int
    count: int
    leader: str
    port: int
    here: int = 1
    place: int = 0

    @property
    def machines(self) -> int:
        """The number of machines, assuming that all have as many ranks as this one."""
        return self.count // self.here


@dataclass(frozen=True, slots=True)
class Variables:
    """The names of the environment variables that hold the fields of Group."""

    rank: str
    count: str
    leader: str
    port: str = ""
    here: str = ""
    place: str = ""


STARTERS = {
    "torchrun": Variables("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE", "LOCAL_RANK"),
    "lws": Variables("LWS_WORKER_INDEX", "LWS_GROUP_SIZE", "LWS_LEADER_ADDRESS"),
}
OWN_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # if "True", torchrun itself listens on MASTER_PORT


def read_group(worker: WorkerConfig, environment: Mapping[str, str]) -> Group:
    """Returns the group that the environment describes. --rank-group must not be `local`. Raises ConfigError."""
    names = STARTERS[worker.rank_group]
    read = _Reader(environment, f"--rank-group {worker.rank_group}")
    count = read.number(names.count, 2, MOST)
    if count != worker.ranks:
        both = f" times --pipeline-parallel-size {worker.pipeline_parallel_size}" * (worker.pipeline_parallel_size > 1)
        raise ConfigError(
            f"--tensor-parallel-size {worker.tensor_parallel_size}{both} is not the {count} of {names.count}"
        )
    rank = read.number(names.rank, 0, count - 1)
    here = read.number(names.here, 1, count) if environment.get(names.here) else 1
    place = read.number(names.place, 0, here - 1) if here > 1 else 0
    return Group(rank, count, read.text(names.leader), _port(worker, names, read, count), here, place)


def _port(worker: WorkerConfig, names: Variables, read: "_Reader", count: int) -> int:
    port = worker.rank_port
    if not port and read.environment.get(OWN_STORE) == "True":
        raise ConfigError("--rank-port is needed, because torchrun itself listens on MASTER_PORT")
    if not port:
        port = read.number(names.port, 1, LAST_PORT) if names.port else PORT
    if port + count - 1 > LAST_PORT:
        raise ConfigError(f"--rank-port {port} leaves no {count} ports up to {LAST_PORT}, of which each rank has one")
    return port


@dataclass(frozen=True, slots=True)
class _Reader:
    environment: Mapping[str, str]
    flag: str

    def text(self, name: str) -> str:
        if not (value := self.environment.get(name, "").strip()):
            raise ConfigError(f"{self.flag} reads the variable {name}, which is not set")
        return value

    def number(self, name: str, least: int, most: int) -> int:
        value = self.text(name)
        if not (value.isascii() and value.isdecimal() and least <= int(value) <= most):
            raise ConfigError(f"{name} must be a number from {least} to {most}, not {value!r} ({self.flag} reads it)")
        return int(value)
