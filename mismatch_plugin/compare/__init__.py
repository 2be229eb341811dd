"""The experiment behind `mismatch-plugin compare`: small RL runs under each algorithm and mismatch, and a report."""
