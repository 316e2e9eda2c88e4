from pathlib import Path

import gguf
import numpy as np

from bench.peers.gguf_layers import repeat


def test_layers_are_taken_in_turns_and_all_else_stays(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "two.gguf"), "llama")
    writer.add_block_count(2)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    for name, value in (("token_embd.weight", 7), ("blk.0.attn_q.weight", 0), ("blk.1.attn_q.weight", 1)):
        writer.add_tensor(name, np.full((2, 32), value, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    repeat(tmp_path / "two.gguf", tmp_path / "three.gguf", 3)
    read = gguf.GGUFReader(tmp_path / "three.gguf")
    assert read.fields["llama.block_count"].contents() == 3
    assert read.fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]
    assert {tensor.name: int(tensor.data[0, 0]) for tensor in read.tensors} == {
        "token_embd.weight": 7, "blk.0.attn_q.weight": 0, "blk.1.attn_q.weight": 1, "blk.2.attn_q.weight": 0
    }  # fmt: skip
