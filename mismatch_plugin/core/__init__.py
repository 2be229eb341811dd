"""Ring 1: the correction in torch on packed tensors (and numpy, where `host` reads those of a CPU). No process groups,
no megatron, no configuration files.

Legend for shape suffixes: T local tokens, N sequences, K columns. All functions take whole sequences or, under context
parallelism, the local tokens of every sequence; what must be summed over a sequence goes through one callable.
"""
