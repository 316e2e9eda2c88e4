"""Steps with adapters whose hidden states a drafter reads: more rows have logits, and the bits are the same."""

from pathlib import Path

import pytest
import torch

from shared.messages import Sampling
from tests.adapters import draw_adapter
from tests.checkpoints import Checkpoints
from tests.worker.lora.harness import CPU, LONGEST, decoder_of, loaded, use
from worker.kv_cache.tensors import KVCache, cache_groups
from worker.model_runner.hidden_states import HiddenStates, ReadStep, read_step
from worker.model_runner.inputs import build_inputs, dummy_sequence
from worker.model_runner.runner import model_for
from worker.models.cpu_decoder import fastest_decoder
from worker.scheduler.sequence import Chunk, Plan


@pytest.mark.parametrize("layers", [(), (0, 1)])
@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
def test_rows_that_are_read_besides_change_no_logits(
    checkpoints: Checkpoints, tmp_path: Path, kind: str, layers: tuple[int, ...]
) -> None:
    """The rows of the prompts are read, but only the last row of each has logits that are used."""
    base = checkpoints(kind)
    decoder, groups = decoder_of(base), cache_groups(decoder_of(base).spec, LONGEST, paged=True)
    cache = KVCache(decoder.spec, [40] * len(groups), 16, torch.float32, CPU, groups, 9, torch.float32)
    adapter = loaded(base, decoder, draw_adapter(base, tmp_path / "a", 1, size=2.0))
    chunks = []
    for at, (length, own) in enumerate([(20, adapter), (9, None), (30, adapter), (1, adapter)]):
        sequence = dummy_sequence(list(range(7, 7 + length)), 16, len(groups), Sampling(1))
        for pages in sequence.pages:
            pages[:] = type(pages)("i", range(1 + 2 * at, 1 + 2 * at + len(pages)))
        sequence.adapter = use(own)
        chunks.append(Chunk(sequence, 0, length, True))
    plan, states = Plan(chunks), list[torch.Tensor]()

    class Reading:
        def reads(self, inputs: object, plan: Plan) -> ReadStep:
            of = HiddenStates(layers, decoder.spec.hidden_size, torch.float32)
            return read_step(given, plan, of, lambda sequence, start, own: states.append(own))

    given, _ = build_inputs(plan.chunks, 16, cache.device, recurrent=decoder.spec.recurrent)
    with torch.inference_mode():
        for model in (decoder, fastest_decoder(decoder, cache)):
            expected = model_for(model, plan, given, None).forward(given, cache).clone()
            assert torch.equal(model_for(model, plan, given, Reading()).forward(given, cache), expected)
    assert [len(one) for one in states[:4]] == [20, 9, 30, 1]
    assert all(torch.equal(one, other) for one, other in zip(states[:4], states[4:], strict=True))
