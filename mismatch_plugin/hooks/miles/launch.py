"""miles under the launcher: as slime, of which it is a fork."""

from mismatch_plugin.hooks.slime.launch import declared

HOST = declared("miles", hands_on=' (--extra-args "--use-tis …")')
