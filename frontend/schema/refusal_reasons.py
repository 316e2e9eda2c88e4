"""The reasons why some fields of other servers are not supported here, for error messages and the documentation."""

from collections.abc import Mapping

_COMPLETION = "/completion has it"
_EXPERTS = "the choice of experts stays in the worker"
_NO_SESSIONS = "this route keeps no conversations"
_DISAGGREGATED = "a worker computes prompt and answer itself"
_VECTORS = "vectors and scores come as the checkpoint says"
_WHOLE = "a text that is too long is refused, never cut"
_NO_BEAMS = "answers are sampled, not searched for with beams"
_OLDER = "`tools` and `tool_choice` replace it"
_AS_IT_IS = "the text of a completion is sent as the model wrote it"
_TEXT_ONLY = "answers are text"
_TEXTS = "prompts are texts or token ids"
_LIMIT = "`max_output_tokens` does it"
_GRAMMAR = "`guided_grammar` does it"
_TRIGGERS = "a grammar holds from the first token on"

WHY: Mapping[str, str] = {
    "access_programs": "there are no access programs",
    "activation": _VECTORS,
    "adaptive_target": "there is no such sampler",
    "add_special_tokens": "a chat template writes all special tokens itself",
    "audio": _TEXT_ONLY,
    "audio_data": _TEXTS,
    "background": "a response is answered on its own connection",
    "best_of": "`n` sets the number of answers",
    "bootstrap_host": _DISAGGREGATED,
    "bootstrap_port": _DISAGGREGATED,
    "bootstrap_room": _DISAGGREGATED,
    "container": "the server runs no code",
    "context_management": "the server never shortens a conversation",
    "custom_logit_processor": "requests bring no code",
    "data_parallel_rank": "the frontend chooses the worker",
    "detokenize": "answers always have their text",
    "disagg_prefill_dp_rank": _DISAGGREGATED,
    "early_stopping": _NO_BEAMS,
    "ebnf": _GRAMMAR,
    "ec_transfer_params": _DISAGGREGATED,
    "echo": "/v1/completions returns the prompt",
    "embed_dtype": "vectors are float32",
    "endianness": "vectors in base64 are little-endian",
    "extra_key": "`cache_salt` keeps the cache of some requests apart",
    "function_call": _OLDER,
    "functions": _OLDER,
    "grammar": _GRAMMAR,
    "grammar_lazy": _TRIGGERS,
    "grammar_triggers": _TRIGGERS,
    "image_data": "images are in chats",
    "image": "the server sets the size of an image",
    "images_config": _TEXT_ONLY,
    "include_reasoning": _AS_IT_IS,
    "input_embeds": _TEXTS,
    "input_ids": "/v1/completions and /generate take token ids",
    "json_schema": "`guided_json` does it",
    "kv_transfer_params": _DISAGGREGATED,
    "label_token_ids": "/generative_scoring reports probabilities of given tokens",
    "length_penalty": _NO_BEAMS,
    "logits_processors": "requests bring no code",
    "logprob_token_ids": "`logprobs` reports the likeliest tokens, and /v1/logprobs scores given ones",
    "lora": "an adapter is chosen by its name as the `model`",
    "lora_id": "an adapter is chosen by its name as the `model`",
    "lora_path": "an adapter is chosen by its name as the `model`",
    "max_chunks_per_doc": "a document is scored as a whole; `max_tokens_per_doc` cuts it",
    "max_completion_tokens": _LIMIT,
    "max_output_tokens": "`max_completion_tokens` does it",
    "max_thinking_tokens": _AS_IT_IS,
    "max_tokens": _LIMIT,
    "mcp_servers": "the server calls no tools",
    "modalities": _TEXT_ONLY,
    "moderation": "the server judges no contents",
    "multimodal_data": "images are in chats",
    "n_cmpl": "`n` does it",
    "n_probs": "`logprobs` does it",
    "ngram_corpus_id": "drafts come from the request itself and earlier ones of its scope",
    "normalize": _VECTORS,
    "personality": "a model here has no such setting",
    "penalize_newline": "penalties hold for line breaks as for all tokens",
    "positional_embed_overrides": _TEXTS,
    "post_sampling_probs": _COMPLETION,
    "prewarm": "every answer has a token; `max_tokens` of 1 warms the cache",
    "prompt": "the server keeps no prompts",
    "prompt_embeds": _TEXTS,
    "prompt_logprobs": "/v1/completions and /v1/chat/completions report them",
    "require_reasoning": _AS_IT_IS,
    "rank_fields": "a document has one text",
    "raw_scores": "scores are between 0 and 1",
    "reasoning_effort": "`reasoning.effort` does it",
    "regex": "`guided_regex` does it",
    "repetition_detection": "penalties and DRY act against repetitions; none ends an answer",
    "response_format": "responses have `text.format`, messages have `output_config.format`",
    "response_fields": _COMPLETION,
    "return_cached_tokens_details": "`usage` always reports how many tokens were cached",
    "return_entropy": "log-probabilities are reported instead",
    "return_flat_raw_top_logprobs": "they are reported in lists",
    "return_indexer_topk": "the choice of positions stays in the worker",
    "return_prompt_token_ids": "/tokenize returns them",
    "return_sampling_mask": "log-probabilities are reported instead",
    "return_hidden_states": "hidden states stay in the worker; /v1/embeddings has vectors",
    "return_prompt_text": "/apply-template returns the text of a prompt",
    "return_routed_experts": _EXPERTS,
    "return_token_ids": "/v1/completions and /v1/chat/completions report them",
    "return_token_offsets": "a prompt is not mapped back to its text",
    "return_tokens": "`return_token_ids` does it",
    "return_tokens_as_token_ids": "/v1/completions and /v1/chat/completions do it",
    "routed_dp_rank": "the frontend chooses the worker",
    "routed_experts_prompt_start": _EXPERTS,
    "routed_experts_start_len": _EXPERTS,
    "separate_reasoning": _AS_IT_IS,
    "session_params": _NO_SESSIONS,
    "softmax": _VECTORS,
    "speed": "there is one speed",
    "stop": "`stop_sequences` does it",
    "stop_regex": "`stop` takes texts; `guided_regex` gives a whole answer its form",
    "stream_reasoning": "reasoning is streamed as it comes",
    "t_max_predict_ms": _COMPLETION,
    "template": "the template of the model is used; `raw` goes without",
    "tfs_z": "there is no such sampler",
    "thinking_budget": _AS_IT_IS,
    "thinking_token_budget": _AS_IT_IS,
    "thread": _NO_SESSIONS,
    "token_ids_logprob": "/v1/logprobs scores given tokens",
    "transformations": "the server sets the size of an image",
    "truncate": _WHOLE,
    "truncate_prompt_tokens": _WHOLE,
    "truncation": "a conversation is counted as it is",
    "use_activation": _VECTORS,
    "use_beam_search": _NO_BEAMS,
    "video_data": _TEXTS,
    "watermarking": "answers have no watermark",
    "web_search_options": "the server searches nothing",
}


def because(path: str) -> str:
    """Returns the reason why the field at a path (such as `text.verbosity`) is not supported, as ": REASON", or ""."""
    reason = WHY.get(path.rpartition(".")[2])
    return f": {reason}" if reason else ""
