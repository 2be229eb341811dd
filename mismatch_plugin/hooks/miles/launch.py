"""miles under the launcher: see `ray_megatron`."""

from functools import partial

from mismatch_plugin.hooks.base import Host
from mismatch_plugin.hooks.slime.launch import FLAGS, plan

HOST = Host("miles", ("miles",), FLAGS, partial(plan, "miles"))
