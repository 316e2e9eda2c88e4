"""The comparison of encoders, without the engines."""

from http.client import HTTPConnection
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from bench.client.server import BenchError
from bench.peers import encoders
from tests.encoders import encoder


def test_texts_have_the_stated_number_of_tokens(tmp_path: Path) -> None:
    folder = encoder(tmp_path / "bert")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    requests = encoders.Words(folder).requests(16, 3)
    assert len(requests) > 2 and {len(texts) for texts in requests} == {3}
    assert {len(tokenizer.encode(text).ids) for texts in requests for text in texts} == {16}


def test_an_answer_without_all_vectors_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoders, "_post", lambda connection, body: (200, b'{"data": [{}]}'))
    connection = HTTPConnection("engine")
    assert encoders._rate(connection, [["a"], ["b"]]) > 0
    with pytest.raises(BenchError, match="engine:80: 200"):
        encoders._rate(connection, [["a"], ["b", "c"]])


def test_table_compares_the_better_of_ours_with_the_best_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rates = {"sluice": 1.0, "sluice bfloat16": 3.0, "llama.cpp": 2.0}
    made = {name: lambda *_, rate=rate: [rate] * 9 for name, rate in rates.items()}
    monkeypatch.setattr(encoders, "COMPARED", made)
    table = encoders.compare(encoder(tmp_path / "bert"), [*rates], tmp_path)
    assert [line.split("|")[-2].strip() for line in table.splitlines()[2:]] == ["1.50"] * 9
