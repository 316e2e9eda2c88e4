"""The types of all request and response bodies, by their names in the API description."""

from collections.abc import Mapping
from typing import Any

from frontend.api.adapters import paths as adapters
from frontend.api.anthropic import response_types as anthropic
from frontend.api.anthropic.messages_input import MessageCountRequest, MessageRequest
from frontend.api.llama_cpp import paths as llama_cpp
from frontend.api.llama_cpp.tokenize import AnyTokenizeRequest
from frontend.api.many import paths as many
from frontend.api.ollama import chat as ollama_chat
from frontend.api.ollama import embed as ollama_embed
from frontend.api.ollama import embeddings as ollama_embeddings
from frontend.api.ollama import generate as ollama_generate
from frontend.api.ollama import models as ollama_models
from frontend.api.ollama import response_types as ollama
from frontend.api.openai import response_types as openai
from frontend.api.openai import responses_types as responses
from frontend.api.openai.chat_input import ChatRequest
from frontend.api.openai.completions_input import CompletionRequest
from frontend.api.openai.responses_input import ResponseCountRequest, ResponseRequest
from frontend.api.pooling import embeddings, logprobs, rerank, score
from frontend.api.pooling import response_types as pooling
from frontend.api.receipts.claim import Verification, VerifyRequest
from frontend.api.requests import response_types
from frontend.api.requests.request_model import RequestModel
from frontend.api.routes import render
from frontend.api.sglang import paths as sglang
from frontend.api.tokenize import DetokenizeRequest
from frontend.observability.stats import Stats

REQUESTS: Mapping[str, type[RequestModel]] = {
    "CompletionRequest": CompletionRequest,
    "ChatCompletionRequest": ChatRequest,
    "ResponseRequest": ResponseRequest,
    "InputRequest": ResponseCountRequest,
    "MessageRequest": MessageRequest,
    "CountRequest": MessageCountRequest,
    "EmbeddingRequest": embeddings.EmbeddingRequest,
    "LogprobsRequest": logprobs.LogprobsRequest,
    "ScoreRequest": score.ScoreRequest,
    "RerankRequest": rerank.RerankRequest,
    "VerifyRequest": VerifyRequest,
    "TokenizeRequest": AnyTokenizeRequest,
    "DetokenizeRequest": DetokenizeRequest,
    "OllamaChatRequest": ollama_chat.OllamaChatRequest,
    "OllamaTextRequest": ollama_generate.OllamaTextRequest,
    "EmbedRequest": ollama_embed.EmbedRequest,
    "OneEmbeddingRequest": ollama_embeddings.OneEmbeddingRequest,
    "ShowRequest": ollama_models.ShowRequest,
    **adapters.REQUESTS,
    **many.REQUESTS,
    **llama_cpp.REQUESTS,
    **sglang.REQUESTS,
}
RESPONSES: Mapping[str, Any] = {
    **many.RESPONSES,
    "Completion": openai.Completion,
    "CompletionChunk": openai.CompletionChunk,
    "ChatCompletion": openai.ChatCompletion,
    "ChatCompletionChunk": openai.ChatCompletionChunk,
    "TokenEvent": openai.TokenEvent,
    "DoneEvent": openai.DoneEvent,
    "ErrorEvent": openai.ErrorEvent,
    "OpenAIError": openai.OpenAIError,
    "Response": responses.Response,
    "ResponseEvent": responses.ResponseEvent,
    "InputTokens": responses.InputTokens,
    "Message": anthropic.Message,
    "MessageEvent": anthropic.MessageEvent,
    "InputTokenCount": anthropic.InputTokenCount,
    "AnthropicError": anthropic.AnthropicError,
    "Embeddings": pooling.Embeddings,
    "ScoredTokensList": pooling.ScoredTokensList,
    "Scores": pooling.Scores,
    "Ranking": pooling.Ranking,
    "RankedTexts": list[pooling.RankedInput],
    "RankingOrTexts": pooling.Ranking | list[pooling.RankedInput],
    "OllamaChat": ollama.OllamaChat,
    "OllamaText": ollama.OllamaText,
    "OllamaEmbeddings": ollama.OllamaEmbeddings,
    "OllamaEmbedding": ollama.OllamaEmbedding,
    "OllamaModels": ollama.OllamaModels,
    "OllamaProcesses": ollama.OllamaProcesses,
    "OllamaShown": ollama.OllamaShown,
    "OllamaVersion": ollama.OllamaVersion,
    "OllamaError": ollama.OllamaError,
    **llama_cpp.RESPONSES,
    **sglang.RESPONSES,
    **render.RESPONSES,
    "Verification": Verification,
    "Tokens": response_types.Tokens,
    "Prompt": response_types.Prompt,
    "TokenizerInfo": response_types.TokenizerInfo,
    "Model": response_types.Model,
    "ModelList": response_types.ModelList,
    "Health": response_types.Health,
    "Load": response_types.Load,
    "Version": response_types.Version,
    "PrefixCacheReset": response_types.PrefixCacheReset,
    "Ready": response_types.Ready,
    "NotReady": response_types.NotReady,
    "Stats": Stats,
}
