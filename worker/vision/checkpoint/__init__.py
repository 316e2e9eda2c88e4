"""Loads the vision tower of a checkpoint.

families        the families with a tower that is served, as rows of data
pixtral         what configs of Pixtral say
lfm2            what configs of LFM2-VL say
names           the names of a tower's tensors in a checkpoint
weights         the weights of a tower and its connector, from a checkpoint
load            loads the tower of a checkpoint, or says why its pictures are not served
"""
