"""Loads the vision tower of a checkpoint.

families        the families with a tower that is served, as rows of data
pixtral         what configs of Pixtral say
lfm2            what configs of LFM2-VL say
gemma4          what configs of Gemma 4 say, and its weights
gemma4_unified  the same of Gemma 4 12B, which has no tower
reading         finds and reads single tensors
names           the names of a tower's tensors in a checkpoint
weights         the weights of a tower and its connector, from a checkpoint
load            loads the tower of a checkpoint, or says why its pictures are not served
"""
