"""Many runs of the lab in one tensor program: every weight and activation has a leading dimension, the run."""
