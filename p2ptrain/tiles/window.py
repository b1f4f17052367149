"""What an output position of a convolution or a pooling reads, along one axis.

With kernel k, stride s, dilation d and `before` padded positions, output position o reads

    o s - before + d j        for j = 0, ..., k - 1

so outputs [a, b) read [a s - before, (b - 1) s - before + d (k - 1) + 1). Positions outside of the
map are padding; inside of it they belong to some tile, so a tile pads only at the map's own border.
(The paper's equations 1 and 2 are the case of an odd kernel, padding k // 2 and no dilation;
Rama et al., "Distributed Convolutional Neural Network Training on Mobile and Edge Clusters", 4.2.)
"""

from __future__ import annotations

from dataclasses import dataclass

from p2ptrain.tiles.span import Span


@dataclass(frozen=True, slots=True)
class Window:
    """One axis of an operator; the default is an element-wise one.

    Attributes:
        before, after: padded positions at the map's two ends.
    """

    kernel: int = 1
    stride: int = 1
    dilation: int = 1
    before: int = 0
    after: int = 0

    @property
    def extent(self) -> int:
        """Positions from the first that an output reads to the last, both included."""
        return self.dilation * (self.kernel - 1) + 1

    def outputs(self, size: int, *, ceil_mode: bool = False) -> int:
        """Output positions of a map of `size`; below 1 where the window does not fit.

        With `ceil_mode` the last window may stand over the map's end, but begins in the map or in
        the padding before it.
        """
        free = size + self.before + self.after - self.extent
        if not ceil_mode:
            return free // self.stride + 1
        count = -(-free // self.stride) + 1
        if (count - 1) * self.stride >= size + self.before:
            count -= 1
        return count

    def reads(self, outputs: Span) -> Span:
        """What `outputs` read, padding included."""
        if outputs.size == 0:
            return Span(0, 0)
        first = outputs.first * self.stride - self.before
        last = (outputs.end - 1) * self.stride - self.before
        return Span(first, last + self.extent)

    def needed(self, outputs: Span, size: int) -> Span:
        """What `outputs` read of the map; empty where that is nothing but padding."""
        read = self.reads(outputs)
        first = min(max(read.first, 0), size)
        return Span(first, min(max(read.end, first), size))

    def padding(self, outputs: Span, size: int) -> tuple[int, int]:
        """How many padded positions `outputs` read before the map, and after it."""
        read = self.reads(outputs)
        before = min(max(-read.first, 0), read.size)
        return before, min(max(read.end - size, 0), read.size - before)

    def taps(self, outputs: Span, counted: Span) -> tuple[int, ...]:
        """For each of `outputs`, how many of the positions that it reads lie in `counted`."""
        return tuple(
            sum(
                counted.first <= o * self.stride - self.before + self.dilation * j < counted.end
                for j in range(self.kernel)
            )
            for o in range(outputs.first, outputs.end)
        )

    def line_before(self, line: int, size: int) -> int:
        """Where to cut the input map for a cut of the output map before position `line`.

        Half-way between the centres of the two windows on either side, which divides the halo
        evenly; with windows that do not overlap there is then no halo at all.
        """
        doubled = (2 * line - 1) * self.stride - 2 * self.before + self.extent
        return min(max(-(-doubled // 2), 0), size)


ELEMENTWISE = Window()
