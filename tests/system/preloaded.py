"""All that `join` and `train` load before they begin; importing it loads it. See `forked`."""

from __future__ import annotations

from p2ptrain.api.loading import collector_at_rest

with collector_at_rest():
    import torch.export._trace  # noqa: F401

    from p2ptrain.api.loading import import_training

    import_training()
