"""Loads the vision tower of a checkpoint.

families        the model families whose tower is supported, as rows of data
pixtral         reads configs of Pixtral
lfm2            reads configs of LFM2-VL
gemma4          reads configs and weights of Gemma 4
gemma4_unified  reads configs and weights of Gemma 4 12B, which has no tower
reading         finds and reads single tensors
names           the names of a tower's tensors in a checkpoint
weights         the weights of a tower and its connector, from a checkpoint
load            loads the tower of a checkpoint, or logs why pictures are not supported
"""
