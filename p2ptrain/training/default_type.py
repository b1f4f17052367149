"""The type of numbers of which a model does not say it is the same on all devices.

`torch.zeros(3)` in a forward() travels without its type, as does the quotient of two whole numbers:
both have torch's default type, which belongs to a process.
"""

from __future__ import annotations

import torch

from p2ptrain.errors import OptionError


def check_default_type() -> None:
    """Raises OptionError: this process has another default type than those of other devices."""
    found = torch.get_default_dtype()
    if found is not torch.float32:
        raise OptionError(
            f"torch's default type is {found} here, and torch.float32 on other devices: call "
            "torch.set_default_dtype(torch.float32) before training. Models and data may have any "
            "type of their own (model.double())"
        )
