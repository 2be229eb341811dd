"""The gate: a step whose mismatch is above a bar is an error, for CI and a run's first steps at learning rate 0."""

from __future__ import annotations

DEFAULT_GATE_KL = 1e-3
"""Bar of `inspect --gate`, nats of k3 a token: about the square of the log-ratio's deviation, halved.

Below it: prime-rl #3543 fails its CI above a mean |log ratio| of .015 over 20 steps at learning rate 0, for Gaussian
noise a k3 of (.015 √(π/2))²/2 = 1.8e-4; a tiny model in bf16 on SGLang's CPU server against fp32 Megatron has 8e-4.
Above it: fp8 with the two sides quantised differently, 8.7e-3 (xtuner #2044; 3.7e-4 once they were quantised alike).
"""


class GateError(RuntimeError):
    """A step's k3_kl is above the bar, or cannot be formed."""


def check_gate(k3_kl: float, bar: float, step: int | None = None) -> None:
    """Raise GateError unless k3_kl ≤ bar; NaN fails. Both in nats per token; step: its number where it is known."""
    if k3_kl <= bar:
        return
    where = "" if step is None else f"step {step}: "
    what = f"k3_kl {k3_kl:.3g} nats per token is above the bar of --mismatch-gate-kl, {bar:g}"
    if k3_kl != k3_kl:
        what = f"k3_kl cannot be compared with the bar of --mismatch-gate-kl, {bar:g}: no token has valid log-probs"
    raise GateError(
        f"{where}{what}. Find the cause with mismatch-plugin inspect on a dump of this step, and on the "
        f"run's metrics; dense engines of one precision are below {DEFAULT_GATE_KL:g} (fp8, int4 and MoE "
        f"routing need more). If this much is meant, raise the bar or leave it out."
    )
