"""`mismatch-plugin inspect`: from a run's metrics to what they mean."""
