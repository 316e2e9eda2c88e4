"""Checks the values of a Submit, so that no frontend can harm the worker.

The message decoder has already checked the types. Frontends make the same checks, with better error messages, but a
frontend may be faulty or hostile.
"""

import math

from shared import messages as m
from shared.prefix_identity import fits
from shared.task import GENERATE, Task
from shared.wire.codec import unpack_u32
from worker.schedule.admission import Refused
from worker.schedule.sequence import Sequence

MAX_STOP_IDS, MAX_LABELS, MAX_NAME_CHARS = 1024, 1024, 1024  # more than any frontend accepts
MAX_TOP = 1024  # up to this many log-probabilities per position are allowed for any number of positions
MAX_LOGPROBS = 1 << 22  # log-probabilities of a request in all (32 MiB), if it asks for more than MAX_TOP per position
MAX_PATH_CHARS = 4096
MAX_BAD_IDS = 1 << 16  # the maximum number of token ids of all bad words together


def check_submit(submit: m.Submit, vocab_size: int, task: Task = GENERATE) -> str:
    """Returns the first problem of the request, or "" if its values cannot make a step raise."""
    sampling = submit.sampling
    try:
        prompt, generated = unpack_u32(submit.prompt), unpack_u32(submit.generated)
        answer, predicted = unpack_u32(submit.answer or b""), unpack_u32(submit.prediction or b"")
    except ValueError:
        return "the prompt is not a whole number of token ids"
    biases = [value for _, value in sampling.logit_bias]
    columns = (prompt, generated, answer, predicted, sampling.stop_token_ids, [id for id, _ in sampling.logit_bias])
    if not prompt or any(ids and not 0 <= min(ids) <= max(ids) < vocab_size for ids in columns):
        return "the prompt is empty, or a token id is outside the vocabulary"
    if len(sampling.stop_token_ids) > MAX_STOP_IDS or len(biases) > vocab_size:
        return "too many stop_token_ids or logit_bias entries"
    if max(len(submit.tenant), len(submit.cache_salt)) > MAX_NAME_CHARS:
        return "the tenant name or the cache salt is too long"
    if problem := _check_features(submit, len(prompt), vocab_size):
        return problem
    if sampling.max_tokens < 0 or (sampling.seed is not None and not 0 <= sampling.seed < 1 << 64):
        return "max_tokens or seed is out of range"
    scored = (sampling.logprobs or 0, sampling.prompt_top)
    most = min(vocab_size, max(MAX_TOP, MAX_LOGPROBS // (len(prompt) + sampling.max_tokens)))
    if not 0 <= min(scored) <= max(scored) <= most or not 0 <= sampling.top_k < 1 << 31:
        return "logprobs or top_k is out of range"
    numbers = (sampling.temperature, sampling.top_p, sampling.min_p, sampling.repetition_penalty)
    if not all(math.isfinite(number) and number >= 0 for number in numbers) or not sampling.repetition_penalty:
        return "a sampling parameter is out of range"
    if not all(map(math.isfinite, (sampling.presence_penalty, sampling.frequency_penalty, *biases))):
        return "a penalty or a bias is not a finite number"
    return _check_pooling(submit, vocab_size, task)


def no_pictures(sequence: Sequence, submit: m.Submit) -> None:
    """Refuses a request with pictures, for models that accept only text."""
    raise Refused("this model sees no images")


def _check_features(submit: m.Submit, prompt_len: int, vocab_size: int) -> str:
    sampling = submit.sampling
    if submit.scored_from >= max(1, prompt_len):
        return "scored_from is beyond the prompt"
    adapter = submit.adapter
    if adapter is not None and (len(adapter.sha256) != 64 or len(adapter.name + adapter.path) > MAX_PATH_CHARS):
        return "the name, the path or the hash of the adapter is malformed"
    if adapter is not None and not math.isfinite(adapter.scale):
        return "the scale of the adapter is not a finite number"
    if not fits(submit.cache_salt, adapter):
        return "the cache salt is not that of a request with this adapter"
    if problem := _check_token_rules(sampling, vocab_size):
        return problem
    if sampling.chain is not None:
        from worker.schedule.records.chain_check import check_chain

        if problem := check_chain(sampling.chain, vocab_size):
            return problem
    if submit.answer is not None and (sampling.logprobs is not None or sampling.prompt_logprobs):
        return "a request that checks an answer cannot ask for log-probabilities"
    return ""


def _check_token_rules(sampling: m.Sampling, vocab_size: int) -> str:
    budget = sampling.thinking
    sequences = [sampling.allowed_token_ids, *sampling.bad_words]
    if budget is not None:
        if budget.tokens < 0 or not budget.opening or budget.forced[:1] != (budget.closing,):
            return "the budget for reasoning is malformed"
        sequences += [budget.opening, budget.forced, budget.blanks or (), *budget.forbidden]
    if any(ids and not 0 <= min(ids) <= max(ids) < vocab_size for ids in sequences):
        return "a token id is outside the vocabulary"
    if not all(sampling.bad_words) or sum(map(len, sequences[1:])) > MAX_BAD_IDS or len(sequences[0]) > vocab_size:
        return "a bad word is empty, or there are too many allowed or forbidden token ids"
    return ""


def _check_pooling(submit: m.Submit, vocab_size: int, task: Task) -> str:
    pooling, sampling = submit.pooling, submit.sampling
    if pooling is None:
        return "" if task.name == "generate" else f"the worker serves --task {task.name}, which generates no text"
    if (
        sampling.max_tokens
        or sampling.prompt_logprobs
        or sampling.grammar
        or submit.generated
        or submit.answer is not None
    ):
        return "a request with pooling cannot generate text"
    ids, of_logits = pooling.token_ids, pooling.kind is m.PoolingKind.LOGITS
    if of_logits != bool(ids) or len(ids) > MAX_LABELS or pooling.dimensions < 0:
        return "dimensions or token_ids of pooling are out of range"
    return "" if all(0 <= id < (task.labels or vocab_size) for id in ids) else "pooling names an id that has no logit"
