"""What every field of a request means, in one sentence each, for /openapi.json and docs/api.md.

A name means the same in every dialect that has it; a test holds that none of a table's fields is missing here, and
none here is in no table. Knows no types and no bounds: those are the tables'.
"""

from collections.abc import Mapping

NO_EFFECT = "accepted, no effect"
REFUSED = "refused: not offered"
USUAL = "of other servers; only what it is here in any case"

SAMPLING = {
    "temperature": "0 takes the likeliest token; higher draws more freely",
    "top_p": "draw from the likeliest tokens that have this share of the probability",
    "top_k": "draw from so many of the likeliest tokens; null: from all",
    "min_p": "draw from tokens that are at least this share as likely as the likeliest",
    "repetition_penalty": "above 1: tokens of the prompt and the answer are divided down",
    "presence_penalty": "taken off the logit of every token that the answer has",
    "frequency_penalty": "the same, for every time that the answer has it",
    "logit_bias": "token ids and what is added to their logits",
    "seed": "the same seed, the same bytes; none: one is drawn and told in the answer",
    "min_tokens": "so many tokens come before the model may end its answer",
    "ignore_eos": "go on until `max_tokens` where the model would end",
    "stop_token_ids": "token ids that end the answer",
    "stop": "texts that end the answer; they are not part of it",
    "stop_sequences": "texts that end the answer; they are not part of it",
}

COMMON = {
    "model": "the served name, see `/v1/models`; any other is refused; a chat may leave it out",
    "max_tokens": "most tokens of the answer; none given in a chat: to the context's end",
    "max_completion_tokens": "newer name of `max_tokens`",
    "max_output_tokens": "most tokens of the answer, thoughts among them; none given: to the context's end",
    "n": "so many answers to each prompt; their seeds are `seed`, `seed` + 1, …",
    "stream": "answer in server-sent events",
    "stream_options": "`include_usage`: a last chunk with the usage; `continuous_usage_stats`: usage in every chunk",
    "timings": "add `timings`: queue, prefill and decode in ms, cached tokens, time between tokens (p50, p99)",
    "cache_salt": "the prefix cache is shared with requests that bring the same one, and with no others",
    "priority": "lower goes first, among requests of the same API key's name",
    "deadline_ms": "for all of the request, from its arrival; then 504, or the stream's error event",
    "user": NO_EFFECT,
    "metadata": NO_EFFECT,
    "store": NO_EFFECT,
    "service_tier": NO_EFFECT,
    "prompt_cache_key": NO_EFFECT,
    "prompt_cache_options": NO_EFFECT,
    "prompt_cache_retention": NO_EFFECT,
    "safety_identifier": NO_EFFECT,
}

ELSEWHERE = {
    "use_beam_search": USUAL,
    "length_penalty": USUAL,
    "early_stopping": USUAL,
    "include_stop_str_in_output": USUAL,
    "no_stop_trim": USUAL,
    "skip_special_tokens": USUAL,
    "spaces_between_special_tokens": USUAL,
    "return_token_ids": USUAL,
    "return_tokens_as_token_ids": USUAL,
    "include_reasoning": USUAL,
    "separate_reasoning": USUAL,
    "stream_reasoning": USUAL,
    "bad_words": USUAL,
    "logits_processors": USUAL,
    "allowed_token_ids": REFUSED,
    "prompt_logprobs": REFUSED,
    "truncate_prompt_tokens": REFUSED,
}

COMPLETIONS = {
    "prompt": "a text, token ids, or several of either",
    "logprobs": "log-probabilities of the answer's tokens; a number: and of so many of the likeliest",
    "echo": "the prompt stands before the answer; with `logprobs` it is scored, too",
    "best_of": "must equal `n`",
    "suffix": "text after the gap; only empty",
    "stream_format": "`events`: typed events instead of OpenAI's chunks; null: `--completions-stream-format`",
}

CHAT = {
    "messages": "the conversation, oldest first",
    "input": "a user's text, or all items of the conversation, oldest first",
    "instructions": "what stands before the conversation",
    "system": "what stands before the conversation",
    "top_logprobs": "so many of the likeliest tokens with each; a chat needs `logprobs`, too",
    "include": "`message.output_text.logprobs`: log-probabilities of the text's tokens; the rest has no effect",
    "chat_template_kwargs": "passed to the model's chat template as they are",
    "add_generation_prompt": "false: do not open the assistant's turn",
    "continue_final_message": "go on with the last message instead of answering it",
    "tools": "functions that the model may call",
    "tool_choice": "whether and which of them it must call",
    "parallel_tool_calls": "false: one call an answer at most",
    "reasoning_effort": "`none` and `minimal`: do not think; others: think; the degree is not enforced",
    "reasoning": "`effort` as `reasoning_effort`; `summary` has no effect: thoughts are told as they are",
    "thinking": "whether to think; `budget_tokens` is not enforced; `display: omitted` hides the words",
    "cache_control": "accepted, no effect: equal beginnings are always found",
    "modalities": "only text",
    "functions": "the old name of `tools`; only empty",
    "function_call": "the old name of `tool_choice`; only `none`",
    "audio": REFUSED,
    "prediction": NO_EFFECT,
    "verbosity": "only `medium`",
    "max_tool_calls": "of built-in tools, of which there are none",
    "truncation": "only `disabled`: what is too long is refused",
    "background": "only false",
    "previous_response_id": REFUSED,
    "conversation": REFUSED,
    "moderation": REFUSED,
    "web_search_options": REFUSED,
    "mcp_servers": "only empty",
    "context_management": "only what keeps all that was said",
    "thread": REFUSED,
    "container": REFUSED,
    "inference_geo": NO_EFFECT,
    "diagnostics": NO_EFFECT,
    "client_metadata": NO_EFFECT,
    "speed": "only `standard`",
}

CONSTRAINT = {
    "response_format": "`text`, `json_object`, or `json_schema` with the schema that the answer keeps to",
    "text": "`format`: the same as `response_format`; `verbosity`: only `medium`",
    "guided_json": "a JSON schema (or the text of one) that the answer keeps to",
    "guided_regex": "a regular expression that the whole answer matches",
    "guided_choice": "the answer is one of these texts",
    "guided_grammar": "a grammar (Lark or GBNF) that the answer keeps to",
    "structured_outputs": "the same by vLLM's newer names",
    "output_config": "`format`: a JSON schema that the answer keeps to; `effort`: told to templates that know degrees",
}

TOKENS = {
    "add_special_tokens": "false: without the tokenizer's special tokens",
    "tokens": "token ids",
}

MEANINGS: Mapping[str, str] = {**COMMON, **ELSEWHERE, **SAMPLING, **COMPLETIONS, **CHAT, **CONSTRAINT, **TOKENS}
