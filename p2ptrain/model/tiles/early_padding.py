"""Where zeros can be put around a map before it is made, instead of around a copy of it.

A tile at one border only pads by hand, for a convolution, which keeps the padded map for its
backward. A rectifier keeps what it has given, so that the map would be there twice:

    x --[relu]-- y --[zeros around it]-- copy of y --[convolution]      kept: y, copy of y
    x --[zeros around it]-- copy of x --[relu]-- y --[convolution]      kept: y

What is computed of the map's own positions is the same to the bit, and of zeros it is zeros.
"""

from __future__ import annotations

import torch

from p2ptrain.model.tiles.elementwise import UNARY, function_of
from p2ptrain.model.tiles.kernels import Kernel
from p2ptrain.model.tiles.schedule import Segment
from p2ptrain.tiles.network import FeatureMap, MapNetwork


def maker_for(network: MapNetwork, segment: Segment, reader: int) -> int | None:
    """The operation that makes what `reader` reads, for it alone.

    None where somebody else reads it too, or it was made before the segment.
    """
    number = network.operations[reader].inputs[0]
    readers = [k for k in segment.operations if number in network.operations[k].inputs]
    if readers != [reader] or number in segment.gives:
        return None
    return next((k for k in segment.operations if network.operations[k].output == number), None)


def leaves_zeros(operator: str, call: Kernel, source: FeatureMap, dtype: torch.dtype) -> bool:
    """Whether `call`, of the named operator, is of each position alone, and of zeros zeros."""
    if function_of(operator) not in UNARY:
        return False
    with torch.no_grad():
        made = call([torch.zeros((1, source.channels, 1, 1), dtype=dtype)])
    return not bool(made.any())
