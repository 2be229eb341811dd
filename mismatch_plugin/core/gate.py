"""The gate's default bar."""

DEFAULT_GATE_KL = 1e-3
"""Nats of k3 a token."""
