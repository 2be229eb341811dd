"""Log-probs and entropy of sampled tokens over a sharded vocabulary, from logits and from hidden states."""

from mismatch_plugin.config.settings import LogProbBackend as Backend
from mismatch_plugin.log_probs.arguments import Entropy, LogProbs, RaggedSamplingMask
from mismatch_plugin.log_probs.hidden_states import vocab_parallel_linear_log_probs
from mismatch_plugin.log_probs.logits import BORROWED, vocab_parallel_log_probs

__all__ = [
    "BORROWED",
    "Backend",
    "Entropy",
    "LogProbs",
    "RaggedSamplingMask",
    "vocab_parallel_linear_log_probs",
    "vocab_parallel_log_probs",
]
