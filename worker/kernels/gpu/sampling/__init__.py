"""The choice of the next token.

sample              draws the next token of each row
softmax_weights     the softmax weights of a row of logits
top_k_top_p         finds the top-k and top-p limits of a row
"""
