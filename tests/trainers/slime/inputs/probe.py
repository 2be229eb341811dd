"""`--custom-megatron-before-log-prob-hook-path probe.arrived`: writes what each training process was told."""
# pyright: basic, reportMissingParameterType=false

import json
import os
import pathlib

PATHS = (
    "custom_tis_function_path",
    "custom_loss_function_path",
    "rollout_data_postprocess_path",
    "custom_megatron_before_train_step_hook_path",
    "custom_megatron_init_path",
)


def arrived(args, model, store_prefix):
    from mismatch_plugin.hooks.slime import ADAPTER

    host = {name: getattr(args, name) for name in ("use_tis", "use_rollout_logprobs", "loss_type", *PATHS)}
    told = {"settings": ADAPTER.settings(args).model_dump(mode="json", exclude_unset=True), "host": host}
    path = pathlib.Path(os.environ["RUN_FOLDER"]) / f"arrived_{args.rank}.json"
    path.write_text(json.dumps(told, sort_keys=True))
