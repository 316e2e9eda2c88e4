"""Receipts: what an answer was made of, so that a server with the same weights can check it.

receipt             the object, and what of a request and its answer it holds
signing             signs receipts with the server's key, and checks signatures
claim               a receipt and its request as one generation that checks it, and the verdict
verify              /v1/receipts/verify
"""
