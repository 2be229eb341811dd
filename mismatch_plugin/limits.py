"""Numbers that settings, formulas and the health check share."""

SAFETY_BOUND = 20.0
"""Log-ratios are clamped to ±20 before `exp`: e^20 ≈ 4.9e8 is finite in every dtype used here."""
MIN_MEAN_WEIGHT = 0.5
"""Weights whose mean is below this shrink the gradient to less than half."""
MIN_EFFECTIVE_SAMPLE_SIZE = 0.3
"""Below this share few units carry the gradient."""
VANISHING_LOG_WEIGHT = -2.0
"""Ours: a mean log-ratio of products below this is a typical product weight below e^−2 = 0.14."""
UPPER_BOUNDS = (1.0, 100.0)
"""An upper bound of weights outside of these is warned of."""
USUAL_KL = 1e-3
"""Nats/token between two engines in bf16 that run the same weights."""
GAMMA_POSITIVE, GAMMA_NEGATIVE = (2.0, 3.0), (3.0, 2.0)
"""(k, λ) of weights e^λ ρ^k e^(−λρ) where A ≥ 0, and where A < 0 (arXiv 2602.10693)."""
