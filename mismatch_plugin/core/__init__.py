"""Ring 1: the correction in pure torch on packed tensors. No process groups, no megatron, no configuration files.

Legend for shape suffixes: T local tokens, N sequences, K columns. All functions take whole sequences or, under context
parallelism, the local tokens of every sequence; what must be summed over a sequence goes through one callable.
"""
