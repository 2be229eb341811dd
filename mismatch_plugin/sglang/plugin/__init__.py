"""What runs inside an SGLang server: fingerprints of the weights that really serve, and what the log-probs are of.

SGLang finds `register` by its entry point (`sglang.srt.plugins`) in every process of a server in whose environment this
package is installed; `pip install --no-deps` is enough. It never changes a token, a log-prob or a schedule.
docs/sglang_plugin.md has more.
"""

from mismatch_plugin.sglang.plugin.register import register

__all__ = ["register"]
