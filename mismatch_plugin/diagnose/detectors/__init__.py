"""Detectors of broken log-prob contracts between a rollout engine and a trainer, behind `mismatch-plugin inspect`."""
