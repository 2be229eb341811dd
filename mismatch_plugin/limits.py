"""The safety bound, which settings and formulas share."""

SAFETY_BOUND = 20.0
"""Log-ratios are clamped to ±20 before `exp`: e^20 ≈ 4.9e8 is finite in every dtype used here."""
