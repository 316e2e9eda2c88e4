"""`python -m bench.real.few_bits` with stand-ins for llama.cpp's programs, whose predictions are Sluice's own."""

import json
import shlex
from pathlib import Path

import pytest
from tokenizers import Tokenizer

import deploy.demo
from bench.peers import gguf_file
from bench.peers.llama_cpp import programs
from bench.real.few_bits import main
from bench.real.predict import main as predict

DEMO = Path(deploy.demo.__file__).parent / "model"
STORY = "Once upon a time there was a little girl. She liked to play in the park with her friends."
WINDOW, WINDOWS = 64, 2
PERPLEXITY = 250.0


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Returns the demo as a GGUF file. Its folder has the stand-ins, too."""
    file, base = tmp_path / "demo.gguf", tmp_path / "saved.base"
    gguf_file.main(DEMO, file)
    ids = Tokenizer.from_file(str(DEMO / "tokenizer.json")).encode(" ".join([STORY] * 12)).ids
    windows = [ids[at : at + WINDOW] for at in range(0, WINDOW * WINDOWS, WINDOW)]
    base.with_suffix(".json").write_text(json.dumps(windows))
    predict(["write", str(base), str(WINDOWS), "--kv-cache-gb", "0.1", "--model", str(file), "--activations", "float"])
    scripts = {
        "llama-imatrix": 'for to; do :; done; touch "$to"',
        "llama-quantize": f'echo "$@" >> {shlex.quote(str(tmp_path))}/asked; cp "${{@: -4:1}}" "${{@: -3:1}}"',
        "llama-perplexity": f'for to; do :; done; cp {shlex.quote(str(base))} "$to"; '
        f'echo "Final estimate: PPL = {PERPLEXITY} +/- 0.5"',
    }
    folder = programs(tmp_path)
    folder.mkdir(parents=True)
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/bash\n{script}\n")
        (folder / name).chmod(0o755)
    return file


def test_a_file_is_predicted_beside_what_llama_cpp_saved(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root, figures, text = file.parent / "root", file.parent / "figures.json", file.parent / "text.txt"
    text.write_text(STORY)
    flags = ["--model", file, "--peers", file.parent, "--root", root, "--text", text, "--json", figures]
    assert main([*map(str, flags), "--formats", "iq1_s,nvfp4", "--engines", "float"]) == 0
    first, second = json.loads(figures.read_text())
    assert first["weights"] == "BF16 100%" and first["predicted"] == WINDOWS * (WINDOW // 2 - 1)
    assert abs(first["kl"]) < 1e-5 and first["error"] < 1e-4 and first["agreement"] == 1
    assert first["theirs"] == PERPLEXITY and first["perplexity"] == second["perplexity"]
    assert f"| {first['perplexity'] / PERPLEXITY - 1:+.2%} ± 0.00% |" in capsys.readouterr().out
    plain, mixed = (file.parent / "asked").read_text().splitlines()
    assert "IQ1_S" in plain and "--tensor-type" not in plain
    assert "attn=nvfp4" in mixed and "ffn=nvfp4" in mixed and "Q8_0" in mixed
    assert not list(root.glob("demo-*")), "files stay behind"


def test_a_program_that_prints_no_perplexity_is_one_sentence(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (programs(file.parent) / "llama-perplexity").write_text("#!/bin/bash\necho nothing\n")
    text = file.parent / "text.txt"
    text.write_text(STORY)
    flags = ["--model", file, "--peers", file.parent, "--root", file.parent / "root", "--text", text]
    assert main([*map(str, flags), "--formats", "q8_0"]) == 1
    assert "llama-perplexity printed nothing like" in capsys.readouterr().err
