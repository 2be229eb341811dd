"""`python -m mismatch_plugin`: the `mismatch-plugin` command."""

from mismatch_plugin.cli import main

main()
