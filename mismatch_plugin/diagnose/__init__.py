"""What a batch or a run tells: what is broken, how large the mismatch is, whether that is normal, which setting fits."""
