"""The settings of a frontend."""

from collections.abc import Mapping
from dataclasses import dataclass

from shared.config.declaration import setting, words

TOOL_FORMATS = (
    "deepseek-v3", "deepseek-v31", "gemma3", "gemma4", "glm", "glm4", "granite", "harmony", "hermes", "kimi", "lfm2",
    "llama", "minimax", "mistral", "mistral-args", "nemotron", "olmo3", "pythonic", "qwen-xml", "seed",
)  # fmt: skip
ALIASES: Mapping[str, str] = {"vllm": "vllm:", "sglang": "sglang:", "llama.cpp": "llamacpp:"}  # and their prefixes


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendConfig:
    """One frontend: HTTP and text."""

    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(8000, "port to listen on; 0: any free one", at_least=0, at_most=65535)
    completions_stream_format: str = setting(
        "openai", "stream format of /v1/completions when the request does not name one", choices=("openai", "events")
    )  # fmt: skip
    chat_template: str = setting("", "file with a chat template (Jinja) that replaces the model's own")
    trust_request_chat_template: bool = setting(
        False, "accept a chat template in a request, which is a program: it runs in a child process, without access to "
        "anything but the request, for at most 2 s and with at most 256 MB",
    )  # fmt: skip
    special_tokens_in_content: bool = setting(
        False, "let the spelling of a special token in a message, a tool, a document or a variable of the chat "
        "template make that token; off: it is text, and only the template writes special tokens",
    )  # fmt: skip
    allowed_media_domains: str = setting(
        "", "hosts from which requests may have images fetched, by name, from the ports 80 and 443 or as NAME:PORT; "
        "addresses of private networks only if they are listed as addresses; empty: none, images are sent as data",
        many=True,
    )  # fmt: skip
    allowed_media_path: str = setting("", "folder below which requests may name images as file: URLs; empty: none")
    max_images_per_request: int = setting(8, "maximum images of one request", at_least=0, at_most=1024)
    max_image_pixels: int = setting(
        33_177_600, "maximum width times height of an image, before it is resized", unit="pixels", at_least=1,
        at_most=1 << 28,
    )  # fmt: skip
    sampling_defaults: str = setting(
        "openai", "sampling parameters of requests that set none; openai: temperature 1, all tokens; model: those "
        "of the checkpoint's generation_config.json (temperature, top_p, top_k, min_p, repetition_penalty)",
        choices=("openai", "model"),
    )  # fmt: skip
    tool_format: str = setting(
        "auto", "syntax in which the model writes tool calls, with harmony also its reasoning; auto: detected from its "
        "chat template", choices=("auto", *TOOL_FORMATS, "none"),
    )  # fmt: skip
    reasoning_format: str = setting(
        "auto", "how the model marks its reasoning; auto: detected from its chat template",
        choices=("auto", "think", "none"),
    )  # fmt: skip
    drifting_calls: bool = setting(
        True, "where a request offers tools, read calls that the model writes in another form than its format's, too: "
        "in a block of code, as bare JSON, as <function=NAME>, within its reasoning (docs/api.md has the forms)",
    )  # fmt: skip
    any_model_name: bool = setting(False, "accept every model name in a request; responses have the served one")
    max_logprobs: int = setting(
        20, "maximum of the likeliest tokens that a request may have reported in each place (`logprobs`, "
        "`top_logprobs`, `prompt_logprobs`, `n_probs`), where -1 is the whole vocabulary; -1: no maximum; "
        "all places of a request that asks for more than 20 may have 1,048,576 together", unit="tokens", at_least=-1,
    )  # fmt: skip
    unknown_fields: str = setting(
        "auto", "fields of a request that this server does not know; refuse: with an error; ignore: name them in the "
        "response's header X-Sluice-Ignored-Fields and once in the log; auto: refuse on /v1/completions, else ignore",
        choices=("auto", "refuse", "ignore"),
    )  # fmt: skip
    beyond_context: str = setting(
        "auto", "a limit on the answer (`max_tokens` and its like) that is more than the prompt leaves of the context; "
        "cut: lower it, and name it in the response's header X-Sluice-Lowered-Fields; refuse: with an error; auto: "
        "refuse on /v1/completions, /v1/messages and /generate, else cut", choices=("auto", "refuse", "cut"),
    )  # fmt: skip
    max_body_bytes: int = setting(
        0, "largest request body; 0: 8 MiB, and with a model that sees images 8 MiB more for each of "
        "--max-images-per-request, at least 27 MiB more, 128 MiB together at most", unit="bytes", at_least=0,
    )  # fmt: skip
    prefix_cache_scope: str = setting(
        "all", "which requests share the K/V of equal beginnings; all: all requests; tenant: those whose API keys have "
        "the same name, so that neither `cached_tokens` nor the time to the first token tells what others have sent",
        choices=("all", "tenant"),
    )  # fmt: skip
    api_keys: str = setting("", "file with one API key per line, optionally followed by its name; empty: no key needed")
    api_key: str = setting(
        "", "API keys, beside those of --api-keys; better given in the variable or the file, because everyone on the "
        "machine can read this command line", many=True, secret=True,
    )  # fmt: skip
    admin_keys: str = setting(
        "", "file with the keys, as in --api-keys, that may also change the server for others: load and unload models "
        "and adapters, empty caches, sleep; empty: all keys if they have one name, else none",
    )  # fmt: skip
    receipt_key: str = setting(
        "", "file with the private key (Ed25519, PEM) that signs receipts; empty: receipts are not signed"
    )
    cors_origins: str = setting(
        "", "origins whose web pages may use this server, such as https://example.com; localhost: all pages of "
        "this machine; *: all pages; empty: only the server's own page", many=True,
    )  # fmt: skip
    allowed_hosts: str = setting(
        "", "host names that requests may be for, beside those of this machine, such as api.example.com or "
        "*.example.com; *: all; empty: without API keys and on a loopback --host none, else all", many=True,
    )  # fmt: skip
    gateway_headers: bool = setting(
        False, "believe the headers of an inference gateway: x-llm-d-inference-fairness-id becomes part of the tenant, "
        "x-llm-d-inference-objective the priority; only where every client comes through a gateway that sets them",
    )  # fmt: skip
    objectives: str = setting(
        "", "NAME=PRIORITY: the priorities of objectives that --gateway-headers reads; as in bodies, lower goes first; "
        "a name that is not here changes nothing", many=True,
    )  # fmt: skip
    keepalive_s: float = setting(15.0, "interval of comment lines on a silent stream", unit="seconds", above=0)
    stall_timeout: float = setting(
        30.0, "a process that makes no progress for this long counts as hanging: not ready, and restarted by `serve`; "
        "each layer of a long step is progress", unit="seconds", above=0,
    )  # fmt: skip
    recovery_timeout: float = setting(
        120.0, "how long streams wait for a lost worker to return", unit="seconds", at_least=0
    )
    remote_prefill_tokens: int = setting(
        1024, "a prompt of which probably at least so many tokens are in no cache is computed by a prefill worker "
        "first, if there is one (--role, --prefill-workers)", unit="tokens", at_least=1,
    )  # fmt: skip
    remote_prefill_timeout: float = setting(
        60.0, "a prompt that a prefill worker has not computed after so long is computed by the worker that generates, "
        "from where the K/V store has it", unit="seconds", above=0,
    )  # fmt: skip
    access_log: str = setting(
        "text", "one line per finished request, but none for successful health checks and metrics scrapes; text: "
        "readable, among the other log lines if --log-level is info; json: one object each, on stdout",
        choices=("off", "text", "json"),
    )  # fmt: skip
    record: str = setting(
        "", "file to which a line of JSON is added for each generating request that has ended: its parameters, seeds, "
        "outcome, times, and hashes of prompts and answers; empty: none",
    )  # fmt: skip
    record_text: bool = setting(
        False, "record requests and answers as they are, too, so that `sluice replay` can send them to another server"
    )
    record_max_bytes: int = setting(
        1 << 30, "size at which the record is renamed FILE.1, an older FILE.1 FILE.2 and so on, and a new one begins; "
        "0: no limit", unit="bytes", at_least=0,
    )  # fmt: skip
    record_files: int = setting(
        10, "how many files of the record are kept, the newest included; older ones are deleted", unit="files",
        at_least=1,
    )  # fmt: skip
    store: str = setting(
        "none", "file in which answers are kept that ask for it, so that they outlive their client and this process: "
        "stateful responses, and streams that can be resumed (docs/kept-answers.md); it has prompts and answers; or a "
        "postgresql:// URL, whose database the frontends of several hosts share (a password is better given in the "
        "variable, in PGPASSWORD or in ~/.pgpass); none: nothing is written", secret=True,
    )  # fmt: skip
    store_max_age: float = setting(
        30 * 86_400.0, "kept answers that ended this long ago are deleted; 0: no limit", unit="seconds", at_least=0
    )
    store_max_bytes: int = setting(
        1 << 30, "size of the store from which on its oldest answers are deleted; 0: no limit", unit="bytes",
        at_least=0,
    )  # fmt: skip
    store_max_key_bytes: int = setting(
        512 << 20, "bytes that one API key may have in the store; its oldest answers make room, and new files, "
        "batches, conversations and answers that still do not fit are refused or not kept; 0: no limit", unit="bytes",
        at_least=0,
    )  # fmt: skip
    upload_gb: float = setting(
        100.0, "with --allow-pull: how large all models that clients upload (Ollama's /api/blobs) may be together; a "
        "GiB of the disk stays free", unit="GiB", at_least=0,
    )  # fmt: skip
    max_file_bytes: int = setting(
        200 << 20, "largest file that may be uploaded, with --store", unit="bytes", at_least=1
    )
    batch_lines: int = setting(
        8, "how many lines of batches a frontend has answered at a time; while clients wait for answers, it is one",
        unit="lines", at_least=1, at_most=1024,
    )  # fmt: skip
    resume_window: float = setting(
        60.0, "how long the answer of a stream with an id is generated without its client, with --store",
        unit="seconds", at_least=0,
    )  # fmt: skip
    otlp_endpoint: str = setting(
        "",
        "OpenTelemetry collector for traces, as http://HOST:4318; empty: OTEL_EXPORTER_OTLP_ENDPOINT, or none",
    )
    worker_addresses: str = setting(
        "", "workers started elsewhere, separated by commas: tcp://HOST:PORT (requests; events on the next port) or "
        "ipc:///FOLDER (the worker's --run-dir); a host name stands for all its addresses",
    )  # fmt: skip
    workers_file: str = setting("", "file with one such worker address per line; read again when it changes")
    metrics_prefix: str = setting("sluice_", "prefix of every metric's name")
    metrics_aliases: str = setting(
        "none", "names of another server under which a frontend's /metrics has its metrics, too, and the load of its "
        "workers; vllm: such as vllm:num_requests_running", choices=("none", *ALIASES),
    )  # fmt: skip
    ssl_certfile: str = setting("", "certificate chain (PEM) for https://; empty: http://")
    ssl_keyfile: str = setting("", "private key (PEM) of --ssl-certfile; empty: in the same file")
    max_connections: int = setting(
        10_000,
        "maximum connections to one frontend; further ones are answered with 503",
        unit="connections",
        at_least=1,
    )
    max_header_bytes: int = setting(64 << 10, "largest request line plus headers", unit="bytes", at_least=1024)
    request_timeout: float = setting(
        60.0,
        "time for a request's headers and body to arrive, after which it is refused with 408",
        unit="seconds",
        above=0,
    )
    write_timeout: float = setting(
        60.0, "a client that reads nothing of its answer for this long is disconnected", unit="seconds", above=0
    )
    idle_timeout: float = setting(
        75.0, "a connection on which no request begins for this long is closed", unit="seconds", above=0
    )
    log_level: str = setting("info", "minimum severity of log lines", choices=("debug", "info", "warning", "error"))
    log_format: str = setting(
        "text", "json: every line of every process is one JSON object, those of the access log too; text: readable "
        "lines", choices=("text", "json"),
    )  # fmt: skip

    @property
    def keeps(self) -> bool:
        """Whether answers are kept."""
        return self.store not in ("", "none")

    @property
    def keyed(self) -> bool:
        """Whether requests need an API key."""
        return bool(self.api_keys or words(self.api_key))
