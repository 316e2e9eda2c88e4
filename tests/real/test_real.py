"""A short form of `python -m tests.real`: a few inputs of each kind, on one server in bfloat16."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.e2e.server import Server
from tests.patience import PATIENCE_S
from tests.real import answers, context, detokenizing, matrix, promises, structured
from tests.real.model import real_model
from tests.real.reference import Reference
from tests.real.report import Row
from tests.worker.matrix import DRAFTING_PAIRS, PAIRS

pytestmark = pytest.mark.skipif(real_model() is None, reason="the real model is not on this machine")


def sound(*rows: Row) -> None:
    assert [sentence for row in rows for sentence in row.wrong] == []


def test_greedy_answers_beside_transformers_differ_only_within_the_error(server: Server, reference: Reference) -> None:
    sound(answers.check(server, reference, "bfloat16", answers.some(), turns=2))


def test_answers_to_random_schemas_and_forced_calls_are_valid(server: Server) -> None:
    sound(*structured.check(server, schemas=8, tools=4, seed=1))


def test_streamed_text_is_what_tokenizers_decodes(server: Server, reference: Reference) -> None:
    sound(*detokenizing.check(server, reference, sequences=8, seed=1))


def test_receipts_and_scores_of_real_answers_are_identical(server: Server) -> None:
    sound(promises.check_receipts(server, 4), promises.check_scores(server, 3))


def test_bits_depend_on_the_request_alone(model_file: Path) -> None:
    sound(matrix.check(model_file, torch.bfloat16, [PAIRS[7], PAIRS[26], DRAFTING_PAIRS[4]]))


def test_stream_of_a_killed_worker_goes_on_with_the_same_bytes(server: Server) -> None:
    ids, pid = context.ids_of(server, 600), server.stats()["worker"]["pid"]
    undisturbed = context.continued(server, ids, 40)
    with ThreadPoolExecutor(1) as pool, server.hold.at(20):
        stream = pool.submit(context.continued, server, ids, 40)
        server.hold.wait()
        os.kill(pid, signal.SIGKILL)
        server.hold.release()
        assert stream.result(timeout=PATIENCE_S) == undisturbed
    assert undisturbed.finish_reason == "length" and len(undisturbed.ids) == 40
    server.until(lambda stats: stats["worker"]["pid"] != pid)
