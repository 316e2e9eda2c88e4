"""A process that is a rank of a worker, with gloo in place of NCCL: `python -m tests.worker.distributed.worker JOB`.

Rank 0 starts the other ranks, or waits for those of --rank-group. It computes some tokens, kills a rank, and prints
what came of it as JSON.
"""

import os
import signal
import sys
import time

import msgspec

from shared.config.settings import ModelConfig, Settings
from shared.config.worker import WorkerConfig
from worker.distributed import exchange, leader
from worker.distributed.messages import ON_GPUS
from worker.distributed.rendezvous import Group, Hosts
from worker.engine.build import Engine, load_engine
from worker.follower import follow
from worker.model_runner.check_kernels import advance, sequences_of
from worker.model_runner.warmup import GREEDY, StepLimits
from worker.scheduler.sequence import Chunk, Plan, Sequence

PROMPT, TOKENS = 20, 8


class Job(msgspec.Struct, frozen=True):
    """killed: the rank to kill once the tokens are computed. rank, port: of this process in --rank-group"""

    folder: str
    tp_size: int = 1
    stages: int = 1
    killed: int = 0
    rank: int = 0
    port: int = 0
    device: str = "cpu"

    @property
    def hosts(self) -> Hosts | None:
        group = Group(self.rank, self.tp_size * self.stages, "127.0.0.1", self.port)
        return Hosts(group, b"") if self.port else None


class Result(msgspec.Struct, frozen=True):
    """error: of the first step after a rank was killed. seconds: how long the step took. pids: of all ranks"""

    ids: list[int]
    error: str
    seconds: float
    pids: list[int]


def settings_of(job: Job) -> Settings:
    worker = WorkerConfig(
        device=job.device, dtype="float32", kv_cache_gb=0.01, threads=1, tensor_parallel_size=job.tp_size,
        pipeline_parallel_size=job.stages,
    )  # fmt: skip
    return Settings(model=ModelConfig(model=job.folder, max_seq_len=64), worker=worker)


def engine_of(job: Job) -> Engine:
    settings = settings_of(job)
    return load_engine(settings.model, settings.worker, hosts=job.hosts)


def sequence_for(engine: Engine) -> Sequence:
    limits = StepLimits(1, PROMPT, engine.size.max_seq_len, engine.size.page_size, 1)
    (sequence,) = sequences_of([(PROMPT, GREEDY)], limits, engine.limits.vocab_size)
    return sequence


def step(engine: Engine, sequence: Sequence) -> int:
    """Computes the uncomputed tokens of a sequence, and returns the next one."""
    chunk = Chunk(sequence, sequence.computed_tokens, sequence.uncomputed_tokens, True)
    (token,) = engine.runner.step(Plan([chunk])).ids
    advance(chunk)
    return token


def generated(engine: Engine, sequence: Sequence) -> list[int]:
    for _ in range(TOKENS):
        sequence.tokens.append(step(engine, sequence))
    return sequence.tokens[PROMPT:]


def main(job: Job) -> Result:
    engine = engine_of(job)
    sequence = sequence_for(engine)
    ids = generated(engine, sequence)
    os.kill(engine.ranks[job.killed], signal.SIGKILL)
    error, began = "", time.monotonic()
    try:
        step(engine, sequence)
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    return Result(ids, error, time.monotonic() - began, [*engine.ranks])


if __name__ == "__main__":
    asked = msgspec.json.decode(sys.argv[1], type=Job)
    leader.exchange_on = exchange.exchange_on = lambda device: ON_GPUS
    if asked.rank:
        assert asked.hosts is not None
        follow(settings_of(asked), asked.hosts)
    else:
        print(msgspec.json.encode(main(asked)).decode())
