"""`python -m mismatch_plugin.launch`: a host's training script, with the correction's flags on its command line."""
