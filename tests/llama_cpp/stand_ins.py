"""Makes stand-ins for the models, adapters, images and templates that llama.cpp's tests fetch from a hub."""

import json
import threading
import zlib
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from tests.adapters import draw_adapter
from tests.checkpoints import EOS, KINDS, build
from tests.embedders import embedder, reranker
from tests.images import drawn, seeing_checkpoint

IMAGES = "https://huggingface.co/ggml-org/tinygemma3-GGUF/resolve/main/test/"
SEEING = "ggml-org/tinygemma3-GGUF:Q8_0"
_TURN = "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}<|eot_id|>"
TEMPLATES = {  # templates that llama-server knows by name; any other value of its flag is itself a template
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n",
    "llama3": f"{{% for m in messages %}}{_TURN}{{% endfor %}}<|start_header_id|>assistant<|end_header_id|>\n\n",
    "command-r": "{% for m in messages %}<|START_OF_TURN_TOKEN|><|{{ m.role | upper }}_TOKEN|>{{ m.content }}"
    "<|END_OF_TURN_TOKEN|>{% endfor %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
}


@dataclass(frozen=True)
class StandIns:
    """models: file or repository of the hub → folder of a stand-in. adapter: a folder that replaces every adapter.

    table: the file that lists the models of a router. folder: where templates are written
    """

    models: dict[str, Path]
    adapter: Path
    table: Path
    folder: Path

    def template(self, given: str) -> Path:
        """Returns a file with the template that a value of `--chat-template` means."""
        text = TEMPLATES.get(given, given)
        file = self.folder / f"{zlib.crc32(text.encode())}.jinja"
        file.write_text(text)
        return file


def made(folder: Path) -> StandIns:
    talker, seeing = endless(folder / "talker"), with_longer_context(seeing_checkpoint("gemma3", folder / "seeing"))
    repositories = ("ggml-org/test-model-stories260K", "ggml-org/test-model-stories260K-infill")
    models = {
        **dict.fromkeys(repositories, talker),
        "stories15M_MOE-F16.gguf": talker,
        SEEING: seeing,
        "bert-bge-small/ggml-model-f16.gguf": embedder(folder / "embedder"),
        "jina-reranker-v1-tiny-en/ggml-model-f16.gguf": reranker(folder / "reranker"),
    }
    table = folder / "models.json"
    entries = {SEEING: seeing, **{f"{name}:F32": talker for name in repositories}}
    table.write_text(json.dumps({"models": {name: {"model": str(path)} for name, path in entries.items()}}))
    return StandIns(models, draw_adapter(talker, folder / "adapter", seed=1), table, folder)


def endless(folder: Path) -> Path:
    """Writes a random model whose answers never end, like the tests' own model: the tokens that are incomplete
    characters, and the end token, have a logit of 0, far below the largest.
    """
    model, tokenizer = build("llama"), KINDS["llama"].tokenizer()
    head = model.get_output_embeddings().weight
    words = [id for id in range(EOS + 1, len(head)) if tokenizer.decode([id]).isprintable()]
    with torch.no_grad():
        plain = head[words] * 3
        head.zero_()
        head[words] = plain
    model.config.max_position_embeddings = 8192
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def with_longer_context(folder: Path) -> Path:
    """Raises the longest context of a checkpoint to the length that the tests need."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["text_config"]["max_position_embeddings"] = 8192
    file.write_text(json.dumps(config))
    return folder


class _Gallery(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        file = BytesIO()
        drawn(32, 32, seed=len(self.path)).save(file, "PNG")
        self.send_response(200)
        self.send_header("Content-Type", "image/png")
        self.end_headers()
        self.wfile.write(file.getvalue())

    def log_message(self, format: str, *args: Any) -> None: ...


def image_server() -> str:
    """Starts a server of images that ends with this process, and returns its URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Gallery)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}/"
