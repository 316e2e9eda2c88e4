"""The settings of a worker."""

from dataclasses import dataclass, replace
from math import inf

from shared.config.declaration import BY_DEVICE, ConfigError, setting, words

GPU_OPTIONS = (
    "pdl", "weight_prefetch", "last_combine", "fused_norms", "prefetch_branch", "library_products",
    "softmax_overlap",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """One worker: device, memory, scheduling."""

    device: str = setting("auto", "device to compute on", choices=("auto", "cpu", "cuda"))
    dtype: str = setting(
        "auto",
        "number format of weights and K/V; auto: as in the checkpoint, but float32 instead of float16 on the CPU",
        choices=("auto", "bfloat16", "float16", "float32"),
    )
    kv_cache_dtype: str = setting(
        "auto",
        "number format of K/V; auto: the same as --dtype; fp8, int8: eight bits, so that twice as many tokens fit; "
        "int8 is more accurate, and for the CPU only; int4: keys as int8 and values in four bits, so that 2.5 times as "
        "many fit, on the CPU only",
        choices=("auto", "fp8", "int8", "int4"),
    )  # fmt: skip
    quantization: str = setting(
        "auto",
        "weights in few bits in the layers; auto: as the checkpoint says; fp8, int8, int4: quantize while loading, "
        "int4 with one scale for 128 values, int4-g32 for 32; fp8-dynamic, int8-dynamic: on a GPU also quantize "
        "activations, with one scale per token; none: widen a quantized checkpoint to --dtype",
        choices=("auto", "none", "fp8", "int8", "int4", "int4-g32", "fp8-dynamic", "int8-dynamic"),
    )
    activations: str = setting(
        "auto",
        "inputs of the layers' weights in few bits on the CPU; float: in --dtype; int8: rounded to 8 bits, with one "
        "scale for 32 values, which multiplies faster and loses a little accuracy; auto: int8 for GGUF files, as "
        "llama.cpp does, where AVX-512 has VNNI and bf16 and there is no AMX, else float",
        choices=("auto", "float", "int8"),
    )
    weights_cache: str = setting(
        "", "folder in which the CPU keeps a copy of the weights as they are in memory, so that the next start only "
        "reads them; empty: none",
    )  # fmt: skip
    threads: int = setting(0, "compute threads on the CPU; 0: one per core", unit="threads", at_least=0, at_most=1024)
    tensor_parallel_size: int = setting(
        1, "processes that compute the model together, each with a part of its weights and of the K/V; on GPUs, each "
        "has a GPU of its own, on the CPU they divide --threads; answers have the same bytes with any number of them",
        unit="processes", at_least=1, at_most=8,
    )  # fmt: skip
    pipeline_parallel_size: int = setting(
        1, "stages into which the layers of the model are cut, each a process with the weights and the K/V of some "
        "layers, for a model that is too large for one machine or GPU; while a stage computes a step, other stages "
        "compute steps of other sequences; on GPUs, each has a GPU of its own, on the CPU they divide --threads; "
        "answers have the same bytes with any number of them; with --tensor-parallel-size, each stage has that many "
        "processes",
        unit="stages", at_least=1, at_most=16,
    )  # fmt: skip
    rank_group: str = setting(
        "local", "where the processes of --tensor-parallel-size and --pipeline-parallel-size are; local: on this "
        "machine, where the first one starts the others; torchrun, lws: on hosts of their own, and each reads which "
        "one it is from the variables of torchrun (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) or of LeaderWorkerSet "
        "(LWS_WORKER_INDEX, LWS_GROUP_SIZE, LWS_LEADER_ADDRESS)",
        choices=("local", "torchrun", "lws"),
    )  # fmt: skip
    rank_port: int = setting(
        0, "port on which the first process of --rank-group waits for the others, which have the ports behind it; 0: "
        "MASTER_PORT, with lws 5557",
        at_least=0, at_most=65535,
    )  # fmt: skip
    rank_check_steps: int = setting(
        1, "with several processes for a model: every so many steps they compare checksums of what all of them have "
        "in common, and the worker is restarted if one differs; 0: never",
        unit="steps", at_least=0,
    )  # fmt: skip
    rank_check_weights: bool = setting(
        True,
        "with several processes for a model: at start, each process reads the part of another one from the "
        "checkpoint, too, and the worker is restarted if that part differs",
    )
    kv_cache_gb: float = setting(0.0, "size of the K/V pool; 0: computed from free memory", unit="GiB", at_least=0)
    gpu_memory_utilization: float = setting(
        0.9, "fraction of the GPU's memory for weights, K/V and scratch buffers", above=0, at_most=1
    )
    batching_mode: str = setting(
        "continuous", "continuous: sequences join and leave at every step; static: a batch fills and runs to its end "
        "before the next one starts",
        choices=("continuous", "static"),
    )  # fmt: skip
    batch_wait_timeout_s: float = setting(
        0.05, "static batching: maximum wait for a batch to fill", unit="seconds", at_least=0
    )
    scheduler_policy: str = setting(
        "fcfs", "fcfs: decodes first, then prompts in order of arrival; prefill_first: prompts before decodes; "
        "decode_round_robin: decodes and prompts alternate when the step is full",
        choices=("fcfs", "prefill_first", "decode_round_robin"),
    )  # fmt: skip
    use_chunked_prefill: bool = setting(True, "split long prompts into chunks that share steps with decodes")
    prefill_chunk_size: int = setting(
        BY_DEVICE, "maximum tokens of one prompt in one step", unit="tokens", at_least=1, shown="512, on a GPU 2048"
    )
    max_prefill_chunks_per_step: int = setting(
        0, "maximum prompts that advance in one step; 0: no limit", unit="prompts", at_least=0
    )
    max_step_tokens: int = setting(
        BY_DEVICE, "token budget of one step", unit="tokens", at_least=1, shown="512, on a GPU 2048"
    )
    target_step_s: float = setting(
        0.15, "target duration of a step that contains decodes: limits the prefill tokens in it, from measured step "
        "times, but never below 64 or the number that makes reading the weights worthwhile; 0: no limit but "
        "--max-step-tokens",
        unit="seconds", at_least=0,
    )  # fmt: skip
    max_batch_size: int = setting(
        BY_DEVICE, "maximum sequences in one step", unit="sequences", at_least=1, shown="64, on a GPU 256"
    )
    max_waiting_requests: int = setting(
        1024, "maximum waiting sequences; further requests are answered with 503. With API keys, one name may hold at "
        "most seven times as many places as it leaves free, so a single name fills at most 7/8 of the queue",
        unit="sequences", at_least=1,
    )  # fmt: skip
    max_waiting_tokens: int = setting(0, "maximum waiting prompt tokens; 0: no limit", unit="tokens", at_least=0)
    kv_cache_backend: str = setting(
        "paged", "paged: pages of --page-size tokens; contiguous: one page of --max-seq-len tokens per sequence",
        choices=("paged", "contiguous"),
    )  # fmt: skip
    page_size: int = setting(32, "tokens per page", unit="tokens", at_least=1)
    prefix_cache: bool = setting(True, "reuse the K/V of equal prompt prefixes")
    kv_store: str = setting(
        "", "folders in which the K/V of prompt prefixes outlives the process, the fastest first, such as /dev/shm/kv "
        "and a folder on a disk; every worker of this host, and other hosts that share the folder, find it there; "
        "their names have no blanks or commas; whoever can read them can read prompts; empty: none",
        many=True,
    )  # fmt: skip
    kv_store_gb: str = setting(
        "10", "how large each folder of --kv-store may become, in their order; one size: the same for all; the least "
        "recently used prefixes make room",
        unit="GiB", many=True,
    )  # fmt: skip
    kv_store_fetch: str = setting(
        "auto", "auto: take a prefix from --kv-store where that is faster than to compute it, as measured; always: "
        "wherever it is there",
        choices=("auto", "always"),
    )  # fmt: skip
    role: str = setting(
        "both", "what frontends ask of this worker; prefill: to compute long prompts, whose K/V goes to --kv-store, "
        "for workers that generate; decode: to generate, from K/V that prefill workers have computed if the prompt is "
        "long; both: all of it; sluice serve --prefill-workers gives workers their roles itself",
        choices=("both", "prefill", "decode"),
    )  # fmt: skip
    state_checkpoint_tokens: int = setting(
        512, "models with recurrent layers: the prefix cache keeps their state after every so many tokens of a "
        "sequence, and near the end of its prompt; rounded up to whole pages",
        unit="tokens", at_least=1,
    )  # fmt: skip
    max_loras: int = setting(
        8, "maximum different LoRA adapters among running sequences", unit="adapters", at_least=1, at_most=1024
    )
    max_cpu_loras: int = setting(
        32, "maximum LoRA adapters in memory; one that is not in use makes room for another, and is read again when it "
        "is asked for",
        unit="adapters", at_least=1, at_most=10000,
    )  # fmt: skip
    max_lora_rank: int = setting(64, "highest rank of a LoRA adapter", at_least=1, at_most=4096)
    encoder_cache_gb: float = setting(
        0.25, "memory for encoded images, so that an image is encoded once for all chunks and later requests",
        unit="GiB", at_least=0,
    )  # fmt: skip
    batch_invariant: bool = setting(True, "compute the same bits for a request whatever else is in its steps")
    cuda_graphs: bool = setting(True, "on a GPU, capture steps as CUDA graphs at start and replay them")
    kernels: str = setting(
        "auto",
        "kernels on a GPU; auto: Triton if a few test steps on this device give the results of plain PyTorch, else "
        "plain PyTorch; triton: Triton without the test; torch: plain PyTorch, which is slower and whose bits may "
        "depend on what else is in a step",
        choices=("auto", "triton", "torch"),
    )
    gpu_options: str = setting(
        "library_products", "ways to compute on a GPU, used only if a test at start gives the same bits with it; all "
        "but library_products are not proven on hardware yet; empty: none (docs/gpu.md)",
        choices=GPU_OPTIONS, many=True,
    )  # fmt: skip
    overlap: bool = setting(True, "on a GPU, launch the next step before the token ids of the last one are read")
    speculation: str = setting(
        "auto", "speculative decoding; ngram: draft tokens from earlier occurrences of the last ones, verified in "
        "one step; only tokens that would have been sampled anyway are kept, so answers do not change; auto: on "
        "the CPU, for models of 64 MiB and more, ngram and the checkpoint's own MTP head if it has one; off: never",
        choices=("auto", "ngram", "off"),
    )  # fmt: skip
    max_draft_tokens: int = setting(
        15, "maximum draft tokens of one sequence per step; a whole step has at most 16", unit="tokens",
        at_least=1, at_most=15,
    )  # fmt: skip
    speculative_config: str = setting(
        "", "JSON as in vLLM with method (ngram, mtp: the checkpoint's own MTP head, eagle3 or draft_model), model "
        "(the EAGLE-3 head or draft model: a checkpoint with the same vocabulary, as for --model) and "
        "num_speculative_tokens; empty: what --speculation says"
    )  # fmt: skip
    seed: int = setting(
        -1,
        "seed of the generator that seeds requests without a seed; -1: the system's entropy",
        at_least=-1,
        at_most=2**64 - 1,
    )
    drain_timeout: float = setting(
        30.0, "on SIGTERM, how long running streams may continue", unit="seconds", at_least=0
    )
    lease_timeout: float = setting(
        10.0, "the requests of a frontend that is silent for this long are dropped", unit="seconds", above=0
    )
    canary_interval: float = setting(
        10.0, "an idle worker computes one dummy token this often, to check that its device still works; 0: never",
        unit="seconds", at_least=0,
    )  # fmt: skip
    worker_metrics_port: int = setting(8001, "port of the worker's own /metrics; 0: none", at_least=0, at_most=65535)
    worker_host: str = setting("127.0.0.1", "address on which the worker's /metrics listens")
    kv_events_endpoint: str = setting(
        "", "tcp://HOST:PORT on which each worker publishes which pages its prefix cache has, in vLLM's format; with "
        "the HOST * the worker listens there, with another it connects; worker i has PORT + i; whoever can read it "
        "sees the tokens of all prompts; empty: nothing is published",
    )  # fmt: skip
    kv_events_replay_endpoint: str = setting(
        "", "tcp://HOST:PORT on which a consumer of --kv-events-endpoint asks for what it missed; worker i has PORT + "
        "i; empty: none",
    )  # fmt: skip
    kv_events_pod: str = setting(
        "", "the POD in the topic kv@POD@MODEL of --kv-events-endpoint, by which a router knows this server; empty: "
        "the name of the host",
    )  # fmt: skip
    expert_metrics: bool = setting(
        False, "of a mixture of experts, count in the worker's /metrics how many rows chose each expert of each layer"
    )

    @property
    def kv_tiers(self) -> list[tuple[str, float]]:
        """The folders of --kv-store, each with its size in GiB. Raises ConfigError."""
        folders, sizes = words(self.kv_store), words(self.kv_store_gb)
        try:
            limits = [float(size) for size in sizes]
        except ValueError:
            limits = []
        if not limits or not all(0 < limit < inf for limit in limits):
            raise ConfigError(f"--kv-store-gb must be numbers above 0, not {self.kv_store_gb!r}")
        if len(limits) not in (1, max(1, len(folders))):
            raise ConfigError(f"--kv-store-gb has {len(limits)} sizes, but --kv-store has {len(folders)} folders")
        return list(zip(folders, limits * len(folders) if len(limits) == 1 else limits, strict=True))

    @property
    def ranks(self) -> int:
        """The number of processes that compute the model together."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def ranks_flag(self) -> str:
        """The flag that asks for several processes."""
        return "--pipeline-parallel-size" if self.pipeline_parallel_size > 1 else "--tensor-parallel-size"


# Default step sizes by device: large enough to keep the device busy, small enough that no stream waits long.

TOKENS, SEQUENCES = 512, 64
GPU_TOKENS, GPU_SEQUENCES = 2048, 256


def with_default_sizes(worker: WorkerConfig, *, on_gpu: bool) -> WorkerConfig:
    """Fills in `max_step_tokens`, `max_batch_size` and `prefill_chunk_size` where unset, to fit the other settings."""
    tokens, sequences = (GPU_TOKENS, GPU_SEQUENCES) if on_gpu else (TOKENS, SEQUENCES)
    chunk = worker.prefill_chunk_size if worker.use_chunked_prefill else 0
    step = worker.max_step_tokens or max(tokens, worker.max_batch_size, chunk)
    return replace(
        worker,
        max_step_tokens=step,
        max_batch_size=worker.max_batch_size or min(sequences, step),
        prefill_chunk_size=worker.prefill_chunk_size or min(tokens, step),
    )
