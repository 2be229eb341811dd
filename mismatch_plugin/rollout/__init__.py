"""What the rollout engine returned, as typed records; a client for SGLang; the checks of its log-probs."""
