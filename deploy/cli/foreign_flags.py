"""Well-known flags of vLLM, SGLang and llama.cpp's server that are no flags here, and what to use instead.

A table, so that someone who brings a command line of another server is told more than that a flag is unknown.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shared.config import ConfigError

VLLM, SGLANG, LLAMA_CPP = "vLLM", "SGLang", "llama.cpp"


@dataclass(frozen=True, slots=True)
class Foreign:
    """Flags of other servers that mean the same.

    options: flag → the servers that have it
    advice: the end of the error message, after "is a flag of vLLM: "
    """

    options: dict[str, tuple[str, ...]]
    advice: str


def _of(server: str, *options: str) -> dict[str, tuple[str, ...]]:
    return {option: (server,) for option in options}


_DETECTED = "Sluice detects it from the chat template; set it with"
FOREIGN = (
    Foreign(
        {"--tensor-parallel-size": (VLLM, SGLANG), "-tp": (VLLM,), "--tp-size": (SGLANG,), "--tp": (SGLANG,),
         "--pipeline-parallel-size": (VLLM, SGLANG), "-pp": (VLLM,), "--pp-size": (SGLANG,),
         "--enable-expert-parallel": (VLLM,), "--ep-size": (SGLANG,), "--tensor-split": (LLAMA_CPP,),
         "-ts": (LLAMA_CPP,), "--split-mode": (LLAMA_CPP,), "-sm": (LLAMA_CPP,)},
        "Sluice does not split a model; use --workers N for one copy on each of N GPUs, and --quantization for a model "
        "that is too large for one",
    ),
    Foreign(
        {"--data-parallel-size": (VLLM, SGLANG), "-dp": (VLLM,), "--dp-size": (SGLANG,), "--dp": (SGLANG,)},
        "use --workers N, one worker per GPU",
    ),
    Foreign(
        _of(VLLM, "--api-server-count", "-asc") | _of(SGLANG, "--tokenizer-worker-num")
        | _of(LLAMA_CPP, "--threads-http"),
        "use --frontends N",
    ),
    Foreign(
        _of(VLLM, "--max-model-len") | _of(SGLANG, "--context-length")
        | _of(LLAMA_CPP, "--ctx-size", "-c"),
        "use --max-seq-len N",
    ),
    Foreign(
        _of(VLLM, "--max-num-seqs") | _of(SGLANG, "--max-running-requests") | _of(LLAMA_CPP, "--parallel", "-np"),
        "use --max-batch-size N; all its sequences share one K/V pool",
    ),
    Foreign(
        _of(VLLM, "--max-num-batched-tokens") | _of(SGLANG, "--max-prefill-tokens")
        | _of(LLAMA_CPP, "--batch-size", "-b"),
        "use --max-step-tokens N",
    ),
    Foreign(
        _of(SGLANG, "--chunked-prefill-size") | _of(VLLM, "--long-prefill-token-threshold")
        | _of(LLAMA_CPP, "--ubatch-size", "-ub"),
        "use --prefill-chunk-size N",
    ),
    Foreign(
        _of(VLLM, "--enable-chunked-prefill", "--no-enable-chunked-prefill"),
        "use --use-chunked-prefill (the default) or --no-use-chunked-prefill",
    ),
    Foreign(
        _of(SGLANG, "--mem-fraction-static"), "use --gpu-memory-utilization FRACTION on a GPU, or --kv-cache-gb GIB"
    ),
    Foreign(
        _of(VLLM, "--kv-cache-memory-bytes", "--num-gpu-blocks-override") | _of(SGLANG, "--max-total-tokens"),
        "use --kv-cache-gb GIB",
    ),
    Foreign(_of(VLLM, "--block-size"), "use --page-size TOKENS"),
    Foreign(
        _of(VLLM, "--enable-prefix-caching", "--no-enable-prefix-caching") | _of(SGLANG, "--disable-radix-cache")
        | _of(LLAMA_CPP, "--cache-reuse", "--no-cache-prompt"),
        "prefix caching is on; switch it off with --no-prefix-cache",
    ),
    Foreign(
        _of(VLLM, "--swap-space", "--cpu-offload-gb") | _of(SGLANG, "--enable-hierarchical-cache"),
        "Sluice keeps weights and K/V on one device; make both smaller with --quantization and --kv-cache-dtype",
    ),
    Foreign(
        _of(LLAMA_CPP, "--n-gpu-layers", "-ngl", "--gpu-layers", "--n-cpu-moe", "--override-tensor", "-ot"),
        "Sluice keeps the whole model on one device; use --device cuda or --device cpu",
    ),
    Foreign(_of(VLLM, "--enforce-eager") | _of(SGLANG, "--disable-cuda-graph"), "use --no-cuda-graphs"),
    Foreign(
        _of(VLLM, "--attention-backend") | _of(SGLANG, "--attention-backend", "--sampling-backend")
        | _of(LLAMA_CPP, "--flash-attn", "-fa"),
        "Sluice has one kernel per device; --kernels torch replaces it by plain PyTorch on a GPU",
    ),
    Foreign(
        _of(LLAMA_CPP, "--cache-type-k", "-ctk", "--cache-type-v", "-ctv"),
        "use --kv-cache-dtype int8 or fp8, which holds for both K and V",
    ),
    Foreign(
        _of(VLLM, "--trust-remote-code") | _of(SGLANG, "--trust-remote-code"),
        "Sluice never runs code of a checkpoint; leave the flag out",
    ),
    Foreign(_of(VLLM, "--load-format") | _of(SGLANG, "--load-format"), "the format is detected; leave the flag out"),
    Foreign(
        _of(VLLM, "--tokenizer") | _of(SGLANG, "--tokenizer-path"),
        "the tokenizer is read from --model; leave the flag out",
    ),
    Foreign(_of(SGLANG, "--model-path") | _of(LLAMA_CPP, "-m"), "use --model"),
    Foreign(
        _of(LLAMA_CPP, "--hf-repo", "-hf", "-hfr", "--hf-file", "-hff"),
        "use --model ORGANIZATION/REPOSITORY:QUANTIZATION",
    ),
    Foreign(_of(LLAMA_CPP, "--alias", "-a"), "use --served-model-name NAME"),
    Foreign(_of(LLAMA_CPP, "-t", "--threads-batch", "-tb"), "use --threads N"),
    Foreign(
        _of(VLLM, "--enable-auto-tool-choice"), "tool calls are always on; leave the flag out",
    ),
    Foreign(
        _of(VLLM, "--tool-call-parser") | _of(SGLANG, "--tool-call-parser"), f"{_DETECTED} --tool-format"
    ),
    Foreign(
        _of(VLLM, "--reasoning-parser", "--enable-reasoning") | _of(SGLANG, "--reasoning-parser"),
        f"{_DETECTED} --reasoning-format",
    ),
    Foreign(
        {"--guided-decoding-backend": (VLLM,), "--structured-outputs-config": (VLLM,), "--grammar-backend": (SGLANG,)},
        "structured output is always on, with one engine; leave the flag out",
    ),
    Foreign(
        {"--jinja": (LLAMA_CPP,)}, "chat templates are always rendered; --chat-template FILE replaces the model's own"
    ),
    Foreign(_of(LLAMA_CPP, "--chat-template-file"), "use --chat-template FILE"),
    Foreign(
        _of(VLLM, "--generation-config") | _of(SGLANG, "--preferred-sampling-params"),
        "use --sampling-defaults model or openai",
    ),
    Foreign(
        _of(VLLM, "--runner", "--convert") | _of(SGLANG, "--is-embedding")
        | _of(LLAMA_CPP, "--embedding", "--embeddings", "--reranking", "--rerank"),
        "use --task embed or --task score",
    ),
    Foreign(
        _of(VLLM, "--enable-lora", "--lora-modules") | _of(SGLANG, "--lora-paths") | _of(LLAMA_CPP, "--lora"),
        "Sluice serves no adapters; merge the adapter into its base model",
    ),
    Foreign(
        _of(VLLM, "--speculative-config") | _of(SGLANG, "--speculative-algorithm", "--speculative-draft-model-path")
        | _of(LLAMA_CPP, "--model-draft", "-md"),
        "Sluice drafts without a second model; use --speculation ngram",
    ),
    Foreign(_of(LLAMA_CPP, "--draft-max", "--draft"), "use --max-draft-tokens N"),
    Foreign(
        _of(VLLM, "--allowed-origins"), "use --cors-origins ORIGIN ..."
    ),
    Foreign(_of(LLAMA_CPP, "--api-key-file"), "use --api-keys FILE"),
    Foreign(_of(LLAMA_CPP, "--ssl-key-file"), "use --ssl-keyfile FILE"),
    Foreign(_of(LLAMA_CPP, "--ssl-cert-file"), "use --ssl-certfile FILE"),
    Foreign(_of(LLAMA_CPP, "--timeout", "-to"), "use --write-timeout SECONDS and --request-timeout SECONDS"),
    Foreign(
        _of(VLLM, "--disable-log-requests", "--no-enable-log-requests", "--disable-uvicorn-access-log")
        | _of(LLAMA_CPP, "--log-disable"),
        "use --access-log off, and --log-level for other lines",
    ),
    Foreign(_of(VLLM, "--uvicorn-log-level") | _of(SGLANG, "--log-level-http"), "use --log-level"),
    Foreign(
        _of(SGLANG, "--enable-metrics") | _of(LLAMA_CPP, "--metrics"),
        "metrics are always at /metrics; leave the flag out",
    ),
    Foreign(
        {"--enable-deterministic-inference": (SGLANG,)}, "--batch-invariant is on by default; leave the flag out"
    ),
    Foreign(_of(SGLANG, "--schedule-policy") | _of(VLLM, "--scheduling-policy"), "use --scheduler-policy"),
    Foreign(_of(SGLANG, "--random-seed"), "use --seed N"),
    Foreign(_of(VLLM, "--otlp-traces-endpoint"), "use --otlp-endpoint URL"),
    Foreign(
        _of(LLAMA_CPP, "--no-mmap", "--mlock"),
        "Sluice always copies the weights into memory of its own; leave the flag out",
    ),
    Foreign(_of(LLAMA_CPP, "--cont-batching", "-cb"), "--batching-mode continuous is the default; leave the flag out"),
)  # fmt: skip


def refuse_foreign(words: Sequence[str]) -> None:
    """Raises ConfigError for the first flag of another server among the words of a command line."""
    known = {option: (servers, row.advice) for row in FOREIGN for option, servers in row.options.items()}
    for word in words:
        flag = word.partition("=")[0]
        if flag in known:
            servers, advice = known[flag]
            raise ConfigError(f"{flag} is a flag of {' and '.join(servers)}: {advice}")
