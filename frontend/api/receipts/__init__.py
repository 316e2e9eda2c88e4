"""Receipts: records of how an answer was made. A server with the same weights can check the answer by its receipt.

receipt             the record
making              makes a receipt from a request and its answer
sampler_chain       a chain of samplers in the form that a receipt states
claim               turns a receipt and its request into a generation that checks it, and into a verdict
verify              reads the request of a receipt as its original route does
"""
