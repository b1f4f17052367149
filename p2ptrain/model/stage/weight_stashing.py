"""A stage's parameters at several versions at once: those that mini-batches in flight have seen.

    version 4   w4 ──┐            forward of a mini-batch: leaves of one version, not the newest's
    version 5   w5 ──┤ leaves     own parameters; gradients gather in them
    version 6   w6 ──┘ = the memory of the stage's own parameters, which the optimizer changes

Weight stashing as in PipeDream (SOSP 2019, section 3.3). A tensor is copied only when an update is
about to change it while an older version of it is still in use: what no update changes exists once.
Memory of versions that are no longer in use is used again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from p2ptrain.errors import InternalError
from p2ptrain.model.wire.tensor_codec import copy_into


class StashedWeights:
    """See the module. Not thread-safe.

    Attributes:
        newest: number of the version that the stage's own parameters are.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], newest: int, *, stashes: bool = True
    ) -> None:
        """Keep versions of a stage's parameters.

        Args:
            parameters: the stage's own, by name; frozen ones have no versions.
            newest: number of what they are now.
            stashes: False keeps none: updates change what mini-batches under way have seen.
        """
        self.newest = newest
        self._own = {name: p for name, p in parameters.items() if p.requires_grad}
        self._stashes = stashes
        self._kept: dict[int, dict[str, nn.Parameter]] = {newest: self._leaves()}
        self._spare: dict[str, Tensor] = {}  # memory of versions that were forgotten
        self._wanted: frozenset[int] = frozenset()  # after the update under way

    @property
    def kept(self) -> tuple[int, ...]:
        """Numbers of the versions that are here, ascending."""
        return tuple(self._kept)

    @property
    def nbytes(self) -> int:
        """Memory of all versions, the newest included, each tensor's counted once."""
        leaves = [leaf for version in self._kept.values() for leaf in version.values()]
        found = {leaf.data_ptr(): leaf.nbytes for leaf in (*leaves, *self._spare.values())}
        return sum(found.values())

    def at(self, version: int) -> Mapping[str, nn.Parameter]:
        """The leaves of a version: what a forward reads, and where its backward adds gradients."""
        if not self._stashes:
            return self._kept[self.newest]
        if version not in self._kept:
            raise InternalError(f"version {version} is not among {self.kept}")
        return self._kept[version]

    def restart(self) -> None:
        """Nothing is under way: only the newest version is wanted."""
        self._forget_but({self.newest})

    def gathered(self, version: int) -> list[Tensor | None]:
        """Take the gradients that backwards with `version` have made, parameter by parameter."""
        gradients: list[Tensor | None] = []
        for leaf in self.at(version).values():
            gradients.append(leaf.grad)
            leaf.grad = None
        return gradients

    def give(self, gradients: Sequence[Tensor | None]) -> None:
        """Have the stage's own parameters take them, in the same order, for the next update."""
        for parameter, gradient in zip(self._own.values(), gradients, strict=True):
            parameter.grad = gradient

    def make_room(self, wanted: Collection[int]) -> None:
        """An update of what has a gradient is about to be made.

        Args:
            wanted: versions that something will still use after it; the others go.

        Raises:
            RuntimeError, MemoryError: there is no memory for one more version. Nothing is lost.
        """
        self._wanted = frozenset(wanted)
        self._forget_but({*self._wanted, self.newest})
        if not self._stashes or self.newest not in self._wanted:
            return
        for name, parameter in self._own.items():
            if parameter.grad is not None:
                parameter.data = copy_into(self._spare.get(name), parameter)
                self._spare.pop(name, None)

    def updated(self) -> None:
        """The update is made: the stage's own parameters are the next version."""
        before, self.newest = self.newest, self.newest + 1
        self._kept[self.newest] = self._leaves() if self._stashes else self._kept[before]
        self._forget_but({*self._wanted, self.newest})

    def average(self, versions: Sequence[int]) -> None:
        """Make the newest version the mean of these: added oldest first, divided by their number.

        A tensor that is the same in all of them stays to the bit.
        """
        with torch.no_grad():
            for name, own in self._own.items():
                parts = [self._kept[version][name] for version in versions]
                if all(part.data_ptr() == parts[0].data_ptr() for part in parts):
                    continue
                total = copy_into(None, parts[0])
                for part in parts[1:]:
                    total.add_(part)
                own.data.copy_(total.div_(len(parts)))

    def _leaves(self) -> dict[str, nn.Parameter]:
        """Of the stage's own parameters as they are: their memory, not their history.

        `.data` shares no version counter, so that autograd does not mind an update in place where
        that is wanted (`stashes`).
        """
        return {name: nn.Parameter(parameter.data) for name, parameter in self._own.items()}

    def _forget_but(self, wanted: Collection[int]) -> None:
        gone = [self._kept.pop(version) for version in self.kept if version not in wanted]
        used = {parameter.data_ptr() for parameter in self._own.values()}
        used |= {leaf.data_ptr() for version in self._kept.values() for leaf in version.values()}
        for version in gone:
            for name, leaf in version.items():
                if leaf.data_ptr() not in used:
                    self._spare[name] = leaf.data
