"""transformers' Trainer on the devices of a household: `p2ptrain.hf.Trainer`.

Nothing else of p2ptrain imports transformers.
"""

from __future__ import annotations

from p2ptrain.errors import OptionError

try:
    import accelerate  # noqa: F401  # TrainingArguments cannot be made without it
    import transformers  # noqa: F401
except ImportError as error:
    raise OptionError(
        f"p2ptrain.hf needs transformers and accelerate ({error}): pip install transformers "
        "accelerate"
    ) from error

from p2ptrain.hf.trainer import Trainer

__all__ = ["Trainer"]
