"""miles under the launcher: see `hooks.slime.launch_plan`."""

from mismatch_plugin.hooks.slime.launch_plan import declared

HOST = declared("miles", hands_on=' (--extra-args "--use-tis …")')
