"""The types of all request and response bodies, by their names in the API description."""

from collections.abc import Mapping
from typing import Any

from frontend.api.anthropic import response_types as anthropic
from frontend.api.anthropic.messages_request import MessageCountRequest, MessageRequest
from frontend.api.ollama import chat as ollama_chat
from frontend.api.ollama import embed as ollama_embed
from frontend.api.ollama import embeddings as ollama_embeddings
from frontend.api.ollama import generate as ollama_generate
from frontend.api.ollama import models as ollama_models
from frontend.api.ollama import types as ollama
from frontend.api.openai import response_types as openai
from frontend.api.openai import responses_types as responses
from frontend.api.openai.chat_request import ChatRequest
from frontend.api.openai.completions import CompletionRequest
from frontend.api.openai.responses_request import ResponseCountRequest, ResponseRequest
from frontend.api.pooling import (
    classify,
    cohere,
    cohere_v1,
    decisions,
    embeddings,
    generative_scoring,
    logprobs,
    predict,
    rerank,
    score,
    systemone,
    tei,
    tei_embed,
    tei_similarity,
)
from frontend.api.pooling import fields as pooling
from frontend.api.pooling import pooling as any_pooling
from frontend.api.verification import Verification, VerifyRequest
from frontend.observability.stats import Stats
from frontend.routes import library, openapi_kept, openapi_paths, tokenize
from frontend.routes.tokenize import AnyTokenizeRequest, DetokenizeRequest
from frontend.schema import responses as response_types
from frontend.schema.base import RequestModel

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
    "PoolingRequest": any_pooling.PoolingRequest,
    "ClassifyRequest": classify.ClassifyRequest,
    "DecisionRequest": decisions.DecisionRequest,
    "GenerativeScoringRequest": generative_scoring.GenerativeScoringRequest,
    "SystemOneRequest": systemone.SystemOneRequest,
    "TeiEmbedRequest": tei_embed.TeiEmbedRequest,
    "TeiSimilarityRequest": tei_similarity.TeiSimilarityRequest,
    "TeiPredictRequest": predict.TeiPredictRequest,
    "CohereEmbedRequest": cohere.CohereEmbedRequest,
    "VerifyRequest": VerifyRequest,
    "TokenizeRequest": AnyTokenizeRequest,
    "DetokenizeRequest": DetokenizeRequest,
    "OllamaChatRequest": ollama_chat.OllamaChatRequest,
    "OllamaTextRequest": ollama_generate.OllamaTextRequest,
    "EmbedRequest": ollama_embed.EmbedRequest,
    "OneEmbeddingRequest": ollama_embeddings.OneEmbeddingRequest,
    "ShowRequest": ollama_models.ShowRequest,
    "PullRequest": library.PullRequest,
    "CreateRequest": library.CreateRequest,
    "CopyRequest": library.CopyRequest,
    "DeleteRequest": library.DeleteRequest,
    **openapi_kept.KEPT_REQUESTS,
    **openapi_kept.BATCH_REQUESTS,
    **openapi_paths.LORA_REQUESTS,
    **openapi_paths.MANY_REQUESTS,
    **openapi_paths.LLAMA_CPP_REQUESTS,
    **openapi_paths.SGLANG_REQUESTS,
}
RESPONSES: Mapping[str, Any] = {
    **openapi_kept.KEPT_RESPONSES,
    **openapi_kept.BATCH_RESPONSES,
    **openapi_paths.MANY_RESPONSES,
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
    "PooledList": any_pooling.PooledList,
    "Classification": classify.Classification,
    "Decision": decisions.Decision,
    "ItemScores": generative_scoring.ItemScores,
    "StructuredDecision": systemone.StructuredDecision,
    "TeiVectors": list[list[float]],
    "TeiSimilarities": list[float],
    "TeiPredictions": list[predict.Predicted | list[predict.Predicted]],
    "TeiError": tei.TeiError,
    "CohereEmbeddings": cohere.CohereEmbeddings,
    "CohereEmbeddingsV1": cohere_v1.CohereEmbeddingsV1,
    "CohereError": cohere.CohereError,
    "RankedTexts": list[pooling.RankedInput],
    "RankingOrTexts": pooling.Ranking | list[pooling.RankedInput],
    "OllamaChat": ollama.OllamaChat,
    "OllamaText": ollama.OllamaText,
    "OllamaEmbeddings": ollama.OllamaEmbeddings,
    "OllamaEmbedding": ollama.OllamaEmbedding,
    "OllamaModels": ollama.OllamaModels,
    "OllamaProcesses": ollama.OllamaProcesses,
    "OllamaShown": ollama.OllamaShown,
    "OllamaProgress": library.OllamaProgress,
    "OllamaVersion": ollama.OllamaVersion,
    "OllamaError": ollama.OllamaError,
    **openapi_paths.LLAMA_CPP_RESPONSES,
    **openapi_paths.SGLANG_RESPONSES,
    **tokenize.RESPONSES,
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
