"""What the plugin costs, side by side with what else there is: the command `mismatch-plugin bench`."""
