"""The training side's file and what cannot be checked, as the detectors' callers name them."""

from mismatch_plugin.rollout.dumps.training import InputError, TrainingSample, match, read_training

__all__ = ["InputError", "TrainingSample", "match", "read_training"]
