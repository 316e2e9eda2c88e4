"""Well-known flags of vLLM, SGLang and llama.cpp's server that Sluice does not have, and what to use instead.

For users who bring a command line of another server, the error then says more than "unknown flag".
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shared.config.declaration import ConfigError


@dataclass(frozen=True, slots=True)
class Foreign:
    """Flags of other servers with the same meaning. A server's field holds the server's flags, separated by spaces."""

    advice: str  # the end of the error message, after "is a flag of vLLM: "
    vllm: str = ""
    sglang: str = ""
    llama_cpp: str = ""

    @property
    def servers(self) -> Mapping[str, Sequence[str]]:
        """Flag → the names of the servers that have this flag."""
        by_server = {"vLLM": self.vllm, "SGLang": self.sglang, "llama.cpp": self.llama_cpp}
        found: dict[str, list[str]] = {}
        for server, flags in by_server.items():
            for flag in flags.split():
                found.setdefault(flag, []).append(server)
        return found


_DETECTED = "Sluice detects it from the chat template; set it with"
FOREIGN = (
    Foreign(
        "Sluice splits a model, experts included, among GPUs or processes of the CPU with --tensor-parallel-size N and "
        "--pipeline-parallel-size N; use --workers N for one copy on each of N GPUs",
        vllm="-tp -pp --enable-expert-parallel",
        sglang="--tp-size --tp --pp-size --ep-size",
        llama_cpp="--tensor-split -ts --split-mode -sm",
    ),
    Foreign(
        "use --workers N, one worker per GPU",
        vllm="--data-parallel-size -dp", sglang="--data-parallel-size --dp-size --dp",
    ),
    Foreign(
        "use --prefill-workers N, or --role prefill and --role decode of sluice worker",
        vllm="--kv-transfer-config", sglang="--disaggregation-mode --disaggregation-transfer-backend",
    ),
    Foreign(
        "use --frontends N",
        vllm="--api-server-count -asc", sglang="--tokenizer-worker-num", llama_cpp="--threads-http",
    ),
    Foreign("use --max-seq-len N", vllm="--max-model-len", sglang="--context-length", llama_cpp="--ctx-size -c"),
    Foreign(
        "use --max-batch-size N; all its sequences share one K/V pool",
        vllm="--max-num-seqs", sglang="--max-running-requests", llama_cpp="--parallel -np",
    ),
    Foreign(
        "use --max-step-tokens N",
        vllm="--max-num-batched-tokens", sglang="--max-prefill-tokens", llama_cpp="--batch-size -b",
    ),
    Foreign(
        "use --prefill-chunk-size N",
        vllm="--long-prefill-token-threshold", sglang="--chunked-prefill-size", llama_cpp="--ubatch-size -ub",
    ),
    Foreign(
        "use --use-chunked-prefill (the default) or --no-use-chunked-prefill",
        vllm="--enable-chunked-prefill --no-enable-chunked-prefill",
    ),
    Foreign("use --gpu-memory-utilization FRACTION on a GPU, or --kv-cache-gb GIB", sglang="--mem-fraction-static"),
    Foreign(
        "use --kv-cache-gb GIB",
        vllm="--kv-cache-memory-bytes --num-gpu-blocks-override", sglang="--max-total-tokens",
    ),
    Foreign("use --page-size TOKENS", vllm="--block-size"),
    Foreign(
        "prefix caching is on; switch it off with --no-prefix-cache",
        vllm="--enable-prefix-caching --no-enable-prefix-caching",
        sglang="--disable-radix-cache",
        llama_cpp="--cache-reuse --no-cache-prompt",
    ),
    Foreign(
        "Sluice keeps weights and K/V on one device; make both smaller with --quantization and --kv-cache-dtype",
        vllm="--swap-space --cpu-offload-gb", sglang="--enable-hierarchical-cache",
    ),
    Foreign(
        "Sluice keeps the whole model on one device; use --device cuda or --device cpu",
        llama_cpp="--n-gpu-layers -ngl --gpu-layers --n-cpu-moe --override-tensor -ot",
    ),
    Foreign("use --no-cuda-graphs", vllm="--enforce-eager", sglang="--disable-cuda-graph"),
    Foreign(
        "Sluice has one kernel per device; --kernels torch replaces it by plain PyTorch on a GPU",
        vllm="--attention-backend", sglang="--attention-backend --sampling-backend", llama_cpp="--flash-attn -fa",
    ),
    Foreign(
        "use --kv-cache-dtype int8 or fp8 for both K and V, or int4 for K in eight bits and V in four",
        llama_cpp="--cache-type-k -ctk --cache-type-v -ctv",
    ),
    Foreign(
        "Sluice never runs code of a checkpoint; leave the flag out",
        vllm="--trust-remote-code", sglang="--trust-remote-code",
    ),
    Foreign("the format is detected; leave the flag out", vllm="--load-format", sglang="--load-format"),
    Foreign("the tokenizer is read from --model; leave the flag out", vllm="--tokenizer", sglang="--tokenizer-path"),
    Foreign("use --model", sglang="--model-path", llama_cpp="-m"),
    Foreign("use --model ORGANIZATION/REPOSITORY:QUANTIZATION", llama_cpp="--hf-repo -hf -hfr --hf-file -hff"),
    Foreign("use --served-model-name NAME", llama_cpp="--alias -a"),
    Foreign("use --threads N", llama_cpp="-t --threads-batch -tb"),
    Foreign("tool calls are always on; leave the flag out", vllm="--enable-auto-tool-choice"),
    Foreign(f"{_DETECTED} --tool-format", vllm="--tool-call-parser", sglang="--tool-call-parser"),
    Foreign(
        f"{_DETECTED} --reasoning-format",
        vllm="--reasoning-parser --enable-reasoning", sglang="--reasoning-parser",
    ),
    Foreign(
        "structured output is always on, with one engine; leave the flag out",
        vllm="--guided-decoding-backend --structured-outputs-config", sglang="--grammar-backend",
    ),
    Foreign("chat templates are always rendered; --chat-template FILE replaces the model's own", llama_cpp="--jinja"),
    Foreign("use --chat-template FILE", llama_cpp="--chat-template-file"),
    Foreign(
        "use --sampling-defaults model or openai",
        vllm="--generation-config", sglang="--preferred-sampling-params",
    ),
    Foreign(
        "use --task embed or --task score",
        vllm="--runner --convert", sglang="--is-embedding", llama_cpp="--embedding --embeddings --reranking --rerank",
    ),
    Foreign(
        "use --lora-modules NAME=PATH ... with folders of PEFT or GGUF files, --max-loras and --max-cpu-loras",
        sglang="--lora-paths --max-loras-per-batch --max-loaded-loras", llama_cpp="--lora",
    ),
    Foreign(
        "--lora-modules and --allow-runtime-lora need no other flag; leave it out",
        vllm="--enable-lora", sglang="--enable-lora",
    ),
    Foreign(
        'use --speculative-config \'{"method": "draft_model", "model": PATH}\', or --speculation ngram without a model',
        sglang="--speculative-algorithm --speculative-draft-model-path",
        llama_cpp="--model-draft -md",
    ),
    Foreign("use --max-draft-tokens N", llama_cpp="--draft-max --draft"),
    Foreign("use --cors-origins ORIGIN ...", vllm="--allowed-origins"),
    Foreign("use --api-keys FILE", llama_cpp="--api-key-file"),
    Foreign("use --ssl-keyfile FILE", llama_cpp="--ssl-key-file"),
    Foreign("use --ssl-certfile FILE", llama_cpp="--ssl-cert-file"),
    Foreign("use --write-timeout SECONDS and --request-timeout SECONDS", llama_cpp="--timeout -to"),
    Foreign(
        "use --access-log off, and --log-level for other lines",
        vllm="--disable-log-requests --no-enable-log-requests --disable-uvicorn-access-log", llama_cpp="--log-disable",
    ),
    Foreign("use --log-level", vllm="--uvicorn-log-level", sglang="--log-level-http"),
    Foreign("metrics are always at /metrics; leave the flag out", sglang="--enable-metrics", llama_cpp="--metrics"),
    Foreign("--batch-invariant is on by default; leave the flag out", sglang="--enable-deterministic-inference"),
    Foreign("use --scheduler-policy", vllm="--scheduling-policy", sglang="--schedule-policy"),
    Foreign("use --seed N", sglang="--random-seed"),
    Foreign("use --otlp-endpoint URL", vllm="--otlp-traces-endpoint"),
    Foreign(
        "Sluice always copies the weights into memory of its own; leave the flag out",
        llama_cpp="--no-mmap --mlock",
    ),
    Foreign("--batching-mode continuous is the default; leave the flag out", llama_cpp="--cont-batching -cb"),
    Foreign("use --max-loaded-models N, with several --model, --models or --models-dir", llama_cpp="--models-max"),
    Foreign("use --models FILE, a table of models in TOML", llama_cpp="--models-preset"),
    Foreign(
        "a server with several --model, --models or --models-dir can sleep, if it has --api-key or --api-keys",
        vllm="--enable-sleep-mode",
    ),
)  # fmt: skip


def refuse_foreign(words: Sequence[str]) -> None:
    """Raises ConfigError for the first flag of another server among the words of a command line."""
    known = {flag: (servers, row.advice) for row in FOREIGN for flag, servers in row.servers.items()}
    for word in words:
        flag = word.partition("=")[0]
        if flag in known:
            servers, advice = known[flag]
            raise ConfigError(f"{flag} is a flag of {' and '.join(servers)}: {advice}")
