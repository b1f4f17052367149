"""The same Job on torch.distributed: `train --engine torch`, inside torchrun."""
