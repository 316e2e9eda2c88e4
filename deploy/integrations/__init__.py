"""Sluice behind NVIDIA Dynamo.

engine   an LLMEngine of Dynamo that computes with a server of Sluice
"""
