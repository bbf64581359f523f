"""A plugin that registers longctx's attention with transformers before axolotl loads the model."""

from axolotl.integrations.base import BasePlugin

import longctx.transformers  # noqa: F401


class LongctxPlugin(BasePlugin):
    """Its import is all that it does."""
