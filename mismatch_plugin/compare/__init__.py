"""The comparison of the algorithms: many small RL runs, their statistics, one page."""
