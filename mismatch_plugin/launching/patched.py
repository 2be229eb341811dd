"""For checkouts patched by 0.1: apply the patch of this version, which imports `mismatch_plugin.launch.patched`."""

from mismatch_plugin.launch.patched import with_our_flags

__all__ = ["with_our_flags"]
