"""Encoders in other engines, measured in a process of their own environment, without HTTP.

    ENVIRONMENT/bin/python in_process_encoder.py NAME FOLDER TEXTS.json

FOLDER is a checkpoint in sentence-transformers' layout with mean pooling, TEXTS.json a list of cases, each a list of
requests, each a list of texts. Prints a line of JSON for each case: its texts per second, with tokenization. The first
request of a case warms up. The environment has the engines only, so this file imports nothing of the project.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Run = Callable[[Mapping[str, Array]], Array]  # ids, mask and types [texts, tokens] → hidden states
INPUTS = ("input_ids", "attention_mask", "token_type_ids")
TOGETHER = 32  # texts a run, padded to the longest of them
THREADS = len(os.sched_getaffinity(0))


def exported(folder: Path) -> str:
    """Returns the path of the encoder in ONNX, in float32, which is written beside its folder the first time."""
    path = folder.with_name(f"{folder.name}.onnx")
    if not path.exists():
        import torch
        from transformers import AutoModel

        model = AutoModel.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()

        class Hidden(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.model = model

            def forward(self, ids: Any, mask: Any, types: Any) -> Any:
                hidden = ((1 - mask.float()) * -1e9)[:, None, None].expand(-1, 1, mask.shape[1], -1)
                return self.model(input_ids=ids, attention_mask=hidden, token_type_ids=types).last_hidden_state

        ids = torch.ones(2, 8, dtype=torch.long)
        axes = {name: {0: "texts", 1: "tokens"} for name in (*INPUTS, "hidden")}
        torch.onnx.export(
            Hidden(), (ids, ids, ids * 0), path, input_names=list(INPUTS), output_names=["hidden"], dynamic_axes=axes,
            dynamo=False, opset_version=17,
        )  # fmt: skip
    return str(path)


def onnxruntime(folder: Path) -> Run:
    import onnxruntime as engine  # type: ignore[import-not-found]

    options = engine.SessionOptions()
    options.intra_op_num_threads = THREADS
    session = engine.InferenceSession(exported(folder), options, providers=["CPUExecutionProvider"])
    return lambda inputs: session.run(None, inputs)[0]


def openvino(folder: Path, **settings: str) -> Run:
    """Without settings, it computes in bfloat16 where the processor has instructions for it."""
    import openvino as engine  # type: ignore[import-not-found]

    settings |= {"INFERENCE_NUM_THREADS": str(THREADS), "PERFORMANCE_HINT": "LATENCY"}
    model = engine.Core().compile_model(exported(folder), "CPU", settings)
    request = model.create_infer_request()
    return lambda inputs: request.infer(inputs)[model.output(0)]


ENGINES: dict[str, Callable[[Path], Run]] = {
    "onnxruntime": onnxruntime,
    "openvino": openvino,
    "openvino f32": lambda folder: openvino(folder, INFERENCE_PRECISION_HINT="f32"),
}


def embed(tokenizer: Any, run: Run, texts: list[str]) -> None:
    for first in range(0, len(texts), TOGETHER):
        found = tokenizer.encode_batch(texts[first : first + TOGETHER])
        ids = np.array([one.ids for one in found], np.int64)
        mask = np.array([one.attention_mask for one in found], np.int64)
        hidden = run(dict(zip(INPUTS, (ids, mask, np.zeros_like(ids)), strict=True)))
        vectors = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)


def main(name: str, folder: Path, file: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.enable_padding()
    run = ENGINES[name](folder)
    for warm_up, *requests in json.loads(file.read_text()):
        embed(tokenizer, run, warm_up)
        begun = time.perf_counter()
        for texts in requests:
            embed(tokenizer, run, texts)
        print(json.dumps(sum(map(len, requests)) / (time.perf_counter() - begun)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
