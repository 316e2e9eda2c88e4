from pathlib import Path

from bench.peers.catalog import PEERS, configured, in_weights, with_context


def test_configured_peer_is_sluice_with_more_flags() -> None:
    peer = configured("--target-step-s 0 --chat-template '/a b/c'")
    plain = PEERS["sluice"].serve(Path("root"), Path("m"), 1)
    assert peer.serve(Path("root"), Path("m"), 1) == [*plain, "--target-step-s", "0", "--chat-template", "/a b/c"]
    assert peer.name == "sluice --target-step-s 0 --chat-template _a b_c", "which is a file's name, too"
    assert peer.alive == PEERS["sluice"].alive


def test_peers_in_weights_read_one_file_on_one_instruction_set(tmp_path: Path) -> None:
    folder, root = tmp_path / "m", Path("root")
    folder.mkdir()
    (folder / "model.safetensors").touch()
    ours = in_weights(configured("--page-size 32"), "q4_k_m", "avx512", False)
    theirs = in_weights(PEERS["llama.cpp"], "q4_k_m", "avx512", False)
    words = ours.serve(root, folder, 1)
    assert words.count("--model") == 1 and words[words.index("--model") + 1] == f"{folder}-q4_k_m.gguf"
    assert words[-2:] == ["--page-size", "32"]
    assert ours.environment == {"SLUICE_ISA": "avx512"}
    command = theirs.serve(root, folder, 1)
    assert command[0] == "root/lcpp-avx512/llama-server" and f"{folder}-q4_k_m.gguf" in command
    made = theirs.prepare(root, folder)
    assert any("gguf_file" in word for command in made for word in command)
    assert made[-1][1:4] == [f"{folder}-bf16.gguf", f"{folder}-q4_k_m.gguf", "Q4_K_M"]


def test_sluice_from_safetensors_quantizes_while_loading() -> None:
    def flags(weights: str) -> list[str]:
        words = in_weights(PEERS["sluice"], weights, "best", True).serve(Path("r"), Path("m"), 1)
        return words[words.index("serve") + 1 : words.index("--served-model-name")]

    assert flags("bf16") == ["--model", "m"]
    assert flags("q8_0") == ["--model", "m", "--quantization", "int8"]
    assert flags("q4_0") == ["--model", "m", "--quantization", "int4"]


def test_peers_that_read_no_gguf_stay_as_they_are() -> None:
    assert in_weights(PEERS["vllm"], "q4_0", "avx2", False) is PEERS["vllm"]


def test_peers_serve_the_context_that_depths_need() -> None:
    def words(name: str) -> list[str]:
        return with_context(PEERS[name], 40_000).serve(Path("r"), Path("m"), 1)

    assert words("llama.cpp")[-4:] == ["-c", "40000", "-np", "1"], (
        "of a flag that is given twice, the last value counts"
    )
    assert words("vllm")[-4:] == ["--max-model-len", "40000", "--max-num-seqs", "1"]
    assert with_context(PEERS["sluice"], 40_000) is PEERS["sluice"]
