"""The K/V pool.

pages                       which page belongs to whom (plain ints)
prefix                      which pages hold a prompt's beginning already (plain ints)
cache, populate             the tensors; memory asked for ahead of use
budget, gpu                 how many pages there are; a GPU's memory
"""
