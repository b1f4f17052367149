"""All that `join` and `train` load before they begin; importing it loads it. See `forked`."""

from __future__ import annotations

from p2ptrain.cli.loading import loading

with loading():
    import torch.export._trace  # noqa: F401

    import p2ptrain.cli.main
    import p2ptrain.control.server  # noqa: F401
    from p2ptrain.node import import_training

    import_training()
