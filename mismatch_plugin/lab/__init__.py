"""The small real RL loop behind `mismatch-plugin compare`, and megatron-core on CPU for the tests."""
