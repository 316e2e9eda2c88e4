"""Recognizes the format of weights by file names, so that an error can name a format that is not served.

Knows file names only, and imports no library, because every command reads it before its `--help`.
"""

from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath

LAYOUT = "a folder with config.json, model.safetensors (or its index) and tokenizer.json, or a GGUF file, is needed"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
FORMATS = {
    **dict.fromkeys(PICKLES, "Python's pickle format"),
    ".onnx": "ONNX", ".h5": "Keras's HDF5", ".keras": "Keras's format", ".msgpack": "Flax's msgpack",
    ".npz": "NumPy's format", ".tflite": "TensorFlow Lite", ".pb": "TensorFlow's format", ".mlpackage": "Core ML",
    ".mlmodel": "Core ML", ".engine": "TensorRT", ".plan": "TensorRT", ".llamafile": "llamafile", ".ggml": "GGML",
    ".nemo": "NeMo's format", ".ot": "rust-bert's format", ".pte": "ExecuTorch", ".xml": "OpenVINO",
}  # fmt: skip
NO_WEIGHTS = ("training_args.bin", "optimizer.", "scheduler.", "rng_state", "tokenizer.")  # beginnings of names


def folder_problem(folder: Path) -> str:
    """Returns a sentence that says why a folder is no checkpoint to serve; empty if it may be a checkpoint."""
    names = [path.name for path in folder.iterdir()]
    if not names:
        return f"{folder} is empty: {LAYOUT}"
    if any(name.endswith(".safetensors") for name in names):
        # A folder with an adapter passes, because the worker has a better error for it.
        is_readable = not {"config.json", "adapter_config.json"}.isdisjoint(names)
        return "" if is_readable else f"{folder} has safetensors, but no config.json: {LAYOUT}"
    if any(name.endswith((".safetensors.index.json", ".gguf")) or name == "gguf.json" for name in names):
        return ""
    return other_format(str(folder), names) or f"{folder} holds no weights: {LAYOUT}"


def other_format(where: str, names: Collection[str]) -> str:
    """Returns a sentence that names the format of the weights if Sluice does not read it; else an empty text.

    names: the names of all files; none of them is safetensors or GGUF
    """
    found = sorted(_in_other_formats(names))
    if not found:
        return ""
    shown = ", ".join(name for name, _ in found[:3]) + (", …" if len(found) > 3 else "")
    formats = " and ".join(dict.fromkeys(kind for _, kind in found))
    pickled = formats == FORMATS[".bin"]
    advice = ", whose files can run any code when they are read: convert them to safetensors" if pickled else ""
    return f"{where} has weights only in {formats} ({shown}){advice or f': {LAYOUT}'}"


def format_of(name: str) -> str:
    """Returns the format that a file's name shows; empty if the name shows no format."""
    return FORMATS.get(PurePosixPath(name).suffix.lower(), "")


def _in_other_formats(names: Collection[str]) -> Iterator[tuple[str, str]]:
    for name in names:
        if (kind := format_of(name)) and not PurePosixPath(name).name.startswith(NO_WEIGHTS):
            yield name, kind
