"""slime under the launcher: see `ray_megatron`."""

from functools import partial

from mismatch_plugin.launching.plan import Host
from mismatch_plugin.launching.ray_megatron import FLAGS, plan

HOST = Host("slime", ("slime",), FLAGS, partial(plan, "slime"))
