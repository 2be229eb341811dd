"""The name of 0.1 that patched hosts import; `mismatch_plugin.launch` is the new one."""
