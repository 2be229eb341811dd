"""What verl's entry point `verl.plugins` loads at `import verl`; importing this module registers the loss."""

import logging

from mismatch_plugin.hooks.verl import register

try:
    register()
except Exception as error:
    # verl swallows this at debug level, and the user would only read that the loss is unknown.
    logging.getLogger("mismatch_plugin").warning(
        "mismatch_plugin cannot register with this verl (%s): loss_mode mismatch will be unknown. Use verl 0.9.1.",
        error,
    )
    raise
