"""Runs the same workloads through transformers' continuous batching, without a server: token ids in, token ids out."""

import time
from collections.abc import Iterator
from typing import Any

from bench.client.load_client import Call, Record
from bench.client.workloads import VOCAB
from bench.gpu.environment import Environment, Row
from bench.gpu.measure.served import NEED_S, scale, summary, workloads
from bench.gpu.setup.checkpoint import checkpoint

NO_EOS = -1
OLDER = "its continuous batching takes no settings"
CLOSING_S = 5.0  # seconds of the time budget that are reserved for the shutdown


def measure(env: Environment, model: str) -> Iterator[Row]:
    import transformers
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.generation import configuration_utils

    engine = f"transformers {transformers.__version__}"
    if not hasattr(configuration_utils, "ContinuousBatchingConfig"):
        yield {"engine": engine, "note": OLDER}
        return
    loaded = AutoModelForCausalLM.from_pretrained(checkpoint(env, model), dtype=env.dtype).to(env.device).eval()
    config = GenerationConfig(do_sample=False, max_new_tokens=1024, eos_token_id=NO_EOS, pad_token_id=0)
    with loaded.continuous_batching_context_manager(config, continuous_batching_config=_limits(env)) as manager:
        for workload in workloads(env):
            if late := env.skip_reason(NEED_S):
                yield {"engine": engine, "workload": workload.name, "note": late}
                continue
            calls = workload.make(VOCAB, scale(env))
            _run(env, manager, workload.warm_up(calls), sequential=True)
            records = _run(env, manager, calls, sequential=workload.sequential)
            yield summary(engine, workload.name, records)
    attention = getattr(loaded.config, "_attn_implementation", "")
    yield {"engine": engine, "workload": "attention", "note": str(attention)}


def _limits(env: Environment) -> Any:
    """Returns None on a GPU, where transformers chooses its limits. On a CPU, transformers would take most of the
    memory, so the limits are small there.
    """
    if env.cuda:
        return None
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    return ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=512)


def _run(env: Environment, manager: Any, calls: list[Call], *, sequential: bool) -> list[Record]:
    """Sends each call at its time or, if `sequential`, after the previous call has ended.

    A call that has not ended when the time budget is over counts as failed.
    """
    start = time.perf_counter()
    records = [Record(error="not ended within the budget") for _ in calls]
    todo, ended = list(enumerate(calls)), 0
    record_of: dict[str, int] = {}
    while ended < len(calls) and env.seconds_left() > CLOSING_S:
        now = time.perf_counter() - start
        while todo and (todo[0][1].at <= now if not sequential else len(record_of) == ended):
            at, call = todo.pop(0)
            records[at].sent = time.perf_counter() - start
            id = manager.add_request(call.prompt, max_new_tokens=call.max_tokens, record_timestamps=True)
            record_of[id] = at
        result = manager.get_result(timeout=0.002)
        if result is None:
            if not manager.is_running():
                raise RuntimeError("its generation thread ended")
            continue
        if result.is_finished():
            ended += 1
            _keep(records[record_of[result.request_id]], result, start)
    return records


def _keep(record: Record, result: Any, start: float) -> None:
    record.done = time.perf_counter() - start
    record.stamps = [stamp - start for stamp in result.timestamps or ()]
    record.prompt_tokens, record.completion_tokens = len(result.prompt_ids), len(result.generated_tokens)
    record.error = str(result.error or "") or ("" if record.stamps else "no tokens")
