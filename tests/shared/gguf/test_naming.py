"""The files that a name means: split files are one model, and several models are listed."""

from pathlib import Path

import pytest

from shared.gguf.naming import HUB_NAME, GgufError, chosen, local_model, models_among, quantization_of, short_name

SPLIT = [f"m-q8_0-{n:05}-of-00003.gguf" for n in (1, 2, 3)]
REPOSITORY = [
    "README.md", "Tiny-Q4_K_M.gguf", "Tiny-Q8_0.gguf", "tiny.iq4_xs.gguf", "mmproj-Tiny-F16.gguf", "Tiny.imatrix.gguf",
    "BF16/Tiny-BF16-00001-of-00002.gguf", "BF16/Tiny-BF16-00002-of-00002.gguf", "Tiny-UD-Q4_K_XL.gguf", "custom.gguf",
]  # fmt: skip


def files(folder: Path, *names: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_bytes(b"GGUF")
    return folder


@pytest.mark.parametrize(
    ("name", "quantization"),
    [
        ("Meta-Llama-3-8B-Instruct-Q4_K_M.gguf", "Q4_K_M"), ("qwen2.5-0.5b-instruct-q8_0.gguf", "Q8_0"),
        ("model.IQ4_NL.gguf", "IQ4_NL"), ("UD/m-UD-Q2_K_XL.gguf", "UD-Q2_K_XL"), ("m-F16.gguf", "F16"),
        ("m-bf16-00001-of-00002.gguf", "BF16"), ("gemma.gguf", "gemma.gguf"), ("Q4_0.gguf", "Q4_0"),
        ("m-MXFP4_MOE.gguf", "MXFP4_MOE"), ("m-NVFP4.gguf", "NVFP4"),
        ("m-UD-IQ2_XXS.gguf", "UD-IQ2_XXS"), ("m.tq1_0.gguf", "TQ1_0"), ("Q4-tuned.gguf", "Q4-tuned.gguf"),
    ],
)  # fmt: skip
def test_quantization_in_a_name(name: str, quantization: str) -> None:
    assert quantization_of([name]) == quantization


def test_models_among_names_joins_split_files_and_skips_companions() -> None:
    assert models_among(reversed(REPOSITORY)) == [
        ["BF16/Tiny-BF16-00001-of-00002.gguf", "BF16/Tiny-BF16-00002-of-00002.gguf"],
        ["Tiny-Q4_K_M.gguf"], ["Tiny-Q8_0.gguf"], ["Tiny-UD-Q4_K_XL.gguf"], ["custom.gguf"], ["tiny.iq4_xs.gguf"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("wanted", "first"),
    [
        ("Q4_K_M", "Tiny-Q4_K_M.gguf"), ("q8_0", "Tiny-Q8_0.gguf"), ("IQ4_XS", "tiny.iq4_xs.gguf"),
        ("bf16", "BF16/Tiny-BF16-00001-of-00002.gguf"), ("custom", "custom.gguf"), ("custom.gguf", "custom.gguf"),
        ("UD-Q4_K_XL", "Tiny-UD-Q4_K_XL.gguf"),
    ],
)  # fmt: skip
def test_chosen_of_a_repository(wanted: str, first: str) -> None:
    model = chosen("org/tiny", REPOSITORY, wanted)
    assert model[0] == first and len(model) == (2 if wanted == "bf16" else 1)


@pytest.mark.parametrize(
    ("names", "wanted", "words"),
    [
        (REPOSITORY, "Q5_K_M", r"has no 'Q5_K_M'; it has BF16, Q4_K_M, Q8_0, UD-Q4_K_XL, custom.gguf, IQ4_XS$"),
        (["a.safetensors"], "Q4_0", r"'org/tiny' has no GGUF files"),
        (["a-Q4_0.gguf", "b-Q4_0.gguf"], "Q4_0", r"several files for 'Q4_0', so name one of them: a-Q4_0.gguf, b-"),
        (SPLIT[:2], "Q8_0", r"org/tiny: m-q8_0-00003-of-00003.gguf is missing, one of the 3 files of this model"),
    ],
)  # fmt: skip
def test_choice_that_fails_lists_what_there_is(names: list[str], wanted: str, words: str) -> None:
    with pytest.raises(GgufError, match=words):
        chosen("org/tiny", names, wanted)


def test_local_file_and_folder(tmp_path: Path) -> None:
    folder = files(tmp_path / "one", "a.gguf", "mmproj-a.gguf", "config.json")
    assert local_model(folder) == [folder / "a.gguf"] == local_model(folder / "a.gguf")
    blob = files(tmp_path / "blobs", "sha256-abc") / "sha256-abc"
    assert local_model(blob) == [blob], "its first bytes say that it is GGUF"
    assert local_model(tmp_path / "missing") is None and local_model(files(tmp_path / "none")) is None
    (tmp_path / "text").write_text("hello")
    assert local_model(tmp_path / "text") is None
    assert local_model(files(tmp_path / "both", "a.gguf", "model.safetensors")) is None


def test_local_split_files_are_one_model(tmp_path: Path) -> None:
    folder = files(tmp_path / "split", *SPLIT)
    whole = [folder / name for name in SPLIT]
    assert local_model(folder) == whole and all(local_model(part) == whole for part in whole)
    whole[1].unlink()
    for path in (folder, whole[2]):
        with pytest.raises(GgufError, match=r"split: m-q8_0-00002-of-00003.gguf is missing"):
            local_model(path)


def test_folder_with_several_models_lists_them(tmp_path: Path) -> None:
    with pytest.raises(
        GgufError, match=r"several GGUF models, so name one of the files: a.gguf, m-q8_0-00001-of-00003"
    ):
        local_model(files(tmp_path / "many", "a.gguf", *SPLIT))


@pytest.mark.parametrize(("name", "fits"), [("org/tiny:Q4_K_M", True), ("org/tiny", False), ("/tmp/a:b", False)])
def test_hub_name(name: str, fits: bool) -> None:
    assert bool(HUB_NAME.fullmatch(name)) is fits


def test_short_name_is_that_of_the_file_or_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "models--Qwen--Qwen3-0.6B" / "snapshots" / "c1899de"
    (tmp_path / "Llama-3.2-1B").mkdir()
    snapshot.mkdir(parents=True)
    for name in ("Qwen3-8B-Q4_K_M.gguf", "big-00001-of-00003.gguf", "v1.5"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path / "Llama-3.2-1B")
    for path, name in (
        (tmp_path / "Qwen3-8B-Q4_K_M.gguf", "Qwen3-8B-Q4_K_M"),
        (tmp_path / "big-00001-of-00003.gguf", "big"),
        (tmp_path / "v1.5", "v1.5"),
        (Path("."), "Llama-3.2-1B"),
        (snapshot, "Qwen/Qwen3-0.6B"),
        (Path("org/model:Q4_0"), "org/model:Q4_0"),
    ):
        assert short_name(str(path)) == name
