"""megatron-core: the loss hook for any training loop with megatron's schedules."""

from mismatch_plugin.hooks.megatron_core.adapter import MegatronLoss
from mismatch_plugin.hooks.megatron_core.batch import MegatronBatch, Sample, make_batch

__all__ = ["MegatronBatch", "MegatronLoss", "Sample", "make_batch"]
