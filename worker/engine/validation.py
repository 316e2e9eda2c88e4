"""Checks the values of a Submit, so that no frontend can harm the worker.

The message decoder has already checked the types. Frontends make the same checks, with better error messages, but a
frontend may be faulty or hostile. A problem begins with the name of the field in backticks, as OpenAI's API calls it;
frontends tell a client its own name of the prompt.
"""

import math
from collections.abc import Iterable
from collections.abc import Sequence as Ids

from shared import messages as m
from shared.checkpoint import GENERATE, Task
from shared.messages import SamplerChain
from shared.messages.requests import LongBreaker, ids_in_lists
from shared.prefix_identity import fits
from shared.wire import unpack_u32
from worker.scheduler.queue import Refused
from worker.scheduler.sequence import Sequence

MAX_STOP_IDS, MAX_LABELS, MAX_NAME_CHARS = 1024, 1024, 1024  # more than any frontend accepts
MAX_TOP = 1024  # up to this many log-probabilities per position are allowed for any number of positions
MAX_LOGPROBS = 1 << 22  # log-probabilities of a request in all (32 MiB), if it asks for more than MAX_TOP per position
MAX_PATH_CHARS = 4096
MAX_BAD_IDS = 1 << 16  # the maximum number of token ids of all bad words together
FEW_LIST_IDS = 1024  # requests with at most this many ids in lists are not counted: the queue's length limits them
# Ids in the lists of all live requests of a tenant, at most. They take 12 to 120 bytes each, so 24 to 240 MiB.
MAX_LIVE_LIST_IDS = 1 << 21


def check_submit(submit: m.Submit, vocab_size: int, task: Task = GENERATE) -> str:
    """Returns the first problem of the request, or "" if its values cannot make a step raise."""
    sampling = submit.sampling
    try:
        prompt, generated = unpack_u32(submit.prompt), unpack_u32(submit.generated)
        answer, predicted = unpack_u32(submit.answer or b""), unpack_u32(submit.prediction or b"")
    except ValueError:
        return "`prompt` is not a whole number of token ids"
    biases = [value for _, value in sampling.logit_bias]
    if not prompt:
        return "`prompt` is empty"
    columns: dict[str, Ids[int]] = {
        "prompt": prompt, "continue_from": generated, "answer": answer, "prediction": predicted,
        "stop_token_ids": sampling.stop_token_ids, "logit_bias": [id for id, _ in sampling.logit_bias],
    }  # fmt: skip
    if problem := _outside(columns.items(), vocab_size):
        return problem
    if len(sampling.stop_token_ids) > MAX_STOP_IDS:
        return f"`stop_token_ids` has {len(sampling.stop_token_ids)} ids; at most {MAX_STOP_IDS} are accepted"
    if len(biases) > vocab_size:
        return f"`logit_bias` has {len(biases)} entries; at most {vocab_size} are accepted"
    if len(submit.tenant) > MAX_NAME_CHARS:
        return "the name of the API key is too long"
    if len(submit.cache_salt) > MAX_NAME_CHARS:
        return "`cache_salt` is too long"
    if problem := _check_features(submit, len(prompt), vocab_size):
        return problem
    if sampling.max_tokens < 0:
        return "`max_tokens` is out of range"
    most = min(vocab_size, max(MAX_TOP, MAX_LOGPROBS // (len(prompt) + sampling.max_tokens)))
    within = {
        "seed": sampling.seed is None or 0 <= sampling.seed < 1 << 64,
        "logprobs": 0 <= (sampling.logprobs or 0) <= most,
        "prompt_logprobs": 0 <= sampling.prompt_top <= most,
        "top_k": 0 <= sampling.top_k < 1 << 31,
        "temperature": math.isfinite(sampling.temperature) and sampling.temperature >= 0,
        "top_p": math.isfinite(sampling.top_p) and sampling.top_p >= 0,
        "min_p": math.isfinite(sampling.min_p) and sampling.min_p >= 0,
        "repetition_penalty": math.isfinite(sampling.repetition_penalty) and sampling.repetition_penalty > 0,
        "presence_penalty": math.isfinite(sampling.presence_penalty),
        "frequency_penalty": math.isfinite(sampling.frequency_penalty),
        "logit_bias": all(map(math.isfinite, biases)),
    }
    if not all(within.values()):
        return f"`{next(name for name, fine in within.items() if not fine)}` is out of range"
    return _check_pooling(submit, vocab_size, task)


def _outside(columns: Iterable[tuple[str, Ids[int]]], vocab_size: int) -> str:
    """Returns a text that names the first id outside the vocabulary, and its field; "" if there is none."""
    for name, ids in columns:
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            id = next(id for id in ids if not 0 <= id < vocab_size)
            return f"`{name}` has the token id {id}, outside 0 to {vocab_size - 1}"
    return ""


def check_lists(submit: m.Submit, live: Iterable[Sequence]) -> str:
    """Returns why the tenant's live requests leave no room for the lists of one more request, or ""."""
    held = sum(one.list_ids for one in live if one.turn.tenant == submit.tenant)
    if held + ids_in_lists(submit.sampling) <= MAX_LIVE_LIST_IDS:
        return ""
    return f"`logit_bias`, `allowed_token_ids` and `bad_words` of live requests have {held} token ids already"


def no_images(sequence: Sequence, submit: m.Submit) -> None:
    """Refuses a request with images, for models that accept only text."""
    raise Refused("`prompt` has images, and this model sees no images")


def _check_features(submit: m.Submit, prompt_len: int, vocab_size: int) -> str:
    sampling = submit.sampling
    if submit.prefill is m.Prefill.ONLY and (submit.pooling or submit.answer is not None or sampling.prompt_logprobs):
        return "`prompt_logprobs`: a prompt whose rows are the result cannot be computed for another worker"
    if submit.second_from >= max(1, prompt_len):
        return "`prompt`: its second text begins beyond its end"
    if submit.scored_from >= max(1, prompt_len):
        return "`prompt_logprobs` begin beyond the prompt"
    adapter = submit.adapter
    if adapter is not None and (len(adapter.sha256) != 64 or len(adapter.name + adapter.path) > MAX_PATH_CHARS):
        return "`model`: the name, the path or the hash of the adapter is malformed"
    if adapter is not None and not math.isfinite(adapter.scale):
        return "`lora`: the scale of the adapter is not a finite number"
    if not fits(submit.cache_salt, adapter):
        return "`cache_salt` is not that of a request with this adapter"
    if problem := _check_token_rules(sampling, vocab_size):
        return problem
    if sampling.chain is not None and (problem := check_chain(sampling.chain, vocab_size)):
        return problem
    if submit.answer is not None and (sampling.logprobs is not None or sampling.prompt_logprobs):
        return "`logprobs`: a request that checks an answer cannot ask for log-probabilities"
    return ""


def _check_token_rules(sampling: m.Sampling, vocab_size: int) -> str:
    budget, allowed, bad = sampling.thinking, sampling.allowed_token_ids, sampling.bad_words
    columns: list[tuple[str, Ids[int]]] = [("allowed_token_ids", allowed), *(("bad_words", ids) for ids in bad)]
    if budget is not None:
        if budget.tokens < 0 or not budget.opening or budget.forced[:1] != (budget.closing,):
            return "`thinking_token_budget` is malformed"
        own = [budget.opening, budget.forced, budget.blanks or (), *budget.forbidden]
        columns += [("thinking_token_budget", ids) for ids in own]
    if problem := _outside(columns, vocab_size):
        return problem
    if len(allowed) > vocab_size:
        return f"`allowed_token_ids` has {len(allowed)} ids; at most {vocab_size} are accepted"
    if not all(bad):
        return "`bad_words`: a word has no token"
    if sum(len(ids) for _, ids in columns[1:]) > MAX_BAD_IDS:
        return f"`bad_words` have more than {MAX_BAD_IDS} token ids"
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
        return "`max_tokens`: a request with pooling cannot generate text"
    ids, of_logits = pooling.token_ids, pooling.kind in (m.PoolingKind.LOGITS, m.PoolingKind.LOGPROBS)
    if pooling.dimensions < 0:
        return "`dimensions` is out of range"
    if pooling.kind is m.PoolingKind.LOGPROBS and task.encoder:
        return "an encoder has no next token"
    if of_logits != bool(ids) or len(ids) > MAX_LABELS:
        return f"`label_token_ids` must be 1 to {MAX_LABELS} ids"
    return _outside([("label_token_ids", ids)], task.labels or vocab_size)


# Checks the values of a chain of samplers, so that a faulty frontend cannot make a step of the worker fail.

SAMPLERS = {"penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"}
MOST = (1 << 31) - 1
MAX_ENTRIES, MAX_TAILS, MAX_TAIL, MAX_HEADS = 16, 512, 64, 1 << 16  # as many as a frontend sends, or more


def check_chain(chain: SamplerChain, vocab_size: int) -> str:
    """Returns the first problem of a chain, or "" if no step will raise because of its values."""
    if len(chain.order) > MAX_ENTRIES or not {*chain.order} <= SAMPLERS:
        return "`samplers` has an unknown sampler, or too many"
    numbers: list[float] = [
        chain.temperature, chain.dynatemp_range, chain.dynatemp_exponent, chain.top_k, chain.top_p, chain.min_p,
        chain.typical_p, chain.top_n_sigma, chain.xtc_probability, chain.xtc_threshold, chain.min_keep,
        chain.mirostat_tau, chain.mirostat_eta,
    ]  # fmt: skip
    if (penalties := chain.penalties) is not None:
        numbers += [penalties.last_n + 1, abs(penalties.presence), abs(penalties.frequency)]
        numbers += [penalties.repetition, 1 / penalties.repetition if penalties.repetition else -1]
    if (dry := chain.dry) is not None:
        numbers += [dry.multiplier, dry.base - 1, dry.allowed_length, dry.last_n + 1]
        if problem := _check_breakers(dry.breakers, dry.long_breakers, vocab_size):
            return problem
    fine = all(math.isfinite(number) and number >= 0 for number in numbers)
    whole = max(chain.top_k, chain.min_keep) <= MOST and chain.mirostat in (0, 1, 2)
    return "" if fine and whole else "`samplers`: a value of a sampler is out of range"


def _check_breakers(packed: bytes, long: tuple[LongBreaker, ...], vocab_size: int) -> str:
    if len(packed) % 4 or len(packed) > 4 * vocab_size or max(unpack_u32(packed), default=0) >= vocab_size:
        return "`dry_sequence_breakers`: a breaker is no token, or there are too many"
    if len(long) > MAX_TAILS or not all(0 < len(one.tail) <= MAX_TAIL for one in long):
        return "`dry_sequence_breakers`: a breaker has too few ids or too many, or there are too many breakers"
    if any(len(one.heads) % 4 for one in long) or sum(len(one.heads) for one in long) > 4 * MAX_HEADS:
        return "`dry_sequence_breakers` begin with too many ids"
    return ""
