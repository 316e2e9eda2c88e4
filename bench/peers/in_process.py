"""Engines that are Python packages, measured in a process of their own environment, without HTTP.

    ENVIRONMENT/bin/python in_process.py NAME FILE.gguf TEXT.txt TOKENS... [--new N] [--threads N]

Prints, for each number of tokens, a line of JSON: the tokens per second of a prompt of so many tokens of the text, and
of the N tokens decoded after it. A first prompt warms up. The environment has the engine only, so this file imports
nothing of the project.
"""

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

WARM_UP = 16  # tokens


@dataclass(frozen=True)
class Rates:
    """prompt: number of its tokens. The rates are tokens per second."""

    prompt: int
    prefill: float
    decode: float


def ik_llama_cpp(file: str, text: str, counts: list[int], new: int, threads: int) -> Iterator[Rates]:
    """Choosing the next token is left out: the package does it in Python."""
    import ik_llama_cpp  # type: ignore[import-not-found]
    from ik_llama_cpp._ctypes_api import llama_batch_free  # type: ignore[import-not-found]
    from ik_llama_cpp._internals import make_batch_range, make_batch_single  # type: ignore[import-not-found]

    engine = ik_llama_cpp.IkLlama(file, n_ctx=max(counts) + new, n_threads=threads, verbose=False)
    context = engine._context

    def compute(batch: Any) -> None:
        failed = context.decode(batch)
        llama_batch_free(batch)
        if failed:
            raise RuntimeError(f"llama_decode returned {failed}")
        context.get_logits(-1)  # waits for them

    tokens = engine.tokenize(text)
    for count in counts:
        context.kv_cache_clear()
        begun = time.perf_counter()
        for at in range(0, count, context._n_ubatch):
            part = tokens[at : min(count, at + context._n_ubatch)]
            compute(make_batch_range(part, pos_start=at, logits_last=at + len(part) == count))
        read = time.perf_counter()
        for at in range(count, count + new):
            compute(make_batch_single(tokens[at % len(tokens)], at))
        yield Rates(count, count / (read - begun), new / (time.perf_counter() - read))


def openvino(file: str, text: str, counts: list[int], new: int, threads: int) -> Iterator[Rates]:
    import openvino_genai  # type: ignore[import-not-found]

    pipeline = openvino_genai.LLMPipeline(file, "CPU", INFERENCE_NUM_THREADS=threads)
    tokenizer = pipeline.get_tokenizer()
    settings = openvino_genai.GenerationConfig(max_new_tokens=new + 1, ignore_eos=True, do_sample=False)
    for count in counts:
        ids = tokenizer.encode(text[: 8 * count])
        ids.input_ids.shape = [1, count]
        ids.attention_mask.shape = [1, count]
        metrics = pipeline.generate(ids, settings).perf_metrics
        yield Rates(count, count / metrics.get_ttft().mean * 1e3, 1e3 / metrics.get_tpot().mean)


def mistral_rs(file: str, text: str, counts: list[int], new: int, threads: int) -> Iterator[Rates]:
    """Uses as many threads as there are processors. Its own counters give the rates, and the number of tokens."""
    import mistralrs  # type: ignore[import-not-found]

    path = Path(file)
    which = mistralrs.Which.GGUF(quantized_model_id=str(path.parent), quantized_filename=path.name)
    runner = mistralrs.Runner(which, prefix_cache_n=0)
    per_token = len(text) / _tokens(runner, mistralrs, text[:4000], 1).prompt_tokens * min(1, 4000 / len(text))
    for count in counts:
        usage = _tokens(runner, mistralrs, text[: round(count * per_token)], new)
        yield Rates(usage.prompt_tokens, usage.avg_prompt_tok_per_sec, usage.avg_compl_tok_per_sec)


def _tokens(runner: Any, mistralrs: Any, prompt: str, new: int) -> Any:
    request = mistralrs.CompletionRequest(
        prompt=prompt, model="default", max_tokens=new, temperature=0.0, ignore_eos=True
    )
    return runner.send_completion_request(request).usage


Engine = Callable[[str, str, list[int], int, int], Iterator[Rates]]
ENGINES: dict[str, Engine] = {"ik_llama.cpp": ik_llama_cpp, "openvino": openvino, "mistral.rs": mistral_rs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=ENGINES)
    parser.add_argument("file")
    parser.add_argument("text", type=Path)
    parser.add_argument("counts", type=int, nargs="+")
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    text = args.text.read_text()
    rates = ENGINES[args.name](args.file, text, [WARM_UP, *args.counts], args.new, args.threads)
    for one in itertools.islice(rates, 1, None):
        print(json.dumps(asdict(one)), flush=True)


if __name__ == "__main__":
    main()
