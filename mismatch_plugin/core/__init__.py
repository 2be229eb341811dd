"""The correction in torch on packed tensors (numpy for those of a CPU): no process groups, megatron or files.

Suffixes: T local tokens, N sequences, K columns. All functions take whole sequences or, under context parallelism, the
local tokens of every sequence; what must be summed over a sequence goes through one callable."""
