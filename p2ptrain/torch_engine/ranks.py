"""The processes that torchrun has started, as one group that does all things together.

    rank 0   loads | reads, computes | meet | update | ...
    rank 1   loads | reads, computes | meet | update | ...
                                       sums; or who has failed, and then all of them end

A rank that fails comes to the next meeting all the same and says so there, so no other one waits
for it in vain. Rank 0 reports it; the others end behind it, because torchrun ends all ranks as soon
as one has.
"""

from __future__ import annotations

import atexit
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from p2ptrain.devices.probes import COLLECTIVES
from p2ptrain.errors import OptionError, PeerError, TrainingError
from p2ptrain.model.wire.tensor_codec import dtype_name, dtype_named

_WAIT = timedelta(hours=12)
"""For a rank that evaluates, or reads slow data. One that is gone is noticed at once."""

_LAST_WAIT = timedelta(seconds=10)

_OVER = "over"

_groups = itertools.count()  # of this process: a later one finds nothing of an earlier one


@cache
def _meeting_point() -> Store:
    """Where the ranks find each other: torchrun's, one for the whole life of the process."""
    store: Store = next(rendezvous("env://", timeout=_WAIT))[0]
    return store


class RankFailed(TrainingError):
    """Another rank has failed; says which, and why."""


class RanksLost(PeerError):
    """Another rank is gone without a word."""


class Ranks:
    """Rank `rank` of `world`.

    Attributes:
        local: its number on this machine, which chooses the accelerator.
    """

    def __init__(self, rank: int = 0, world: int = 1, local: int = 0) -> None:
        self.rank, self.world, self.local = rank, world, local
        self._store: Store | None = None
        self._sums_on_cards = False  # else what lies on one crosses to the host for it

    @classmethod
    def of_torchrun(cls) -> Ranks:
        """This process among those of torchrun; alone without one.

        Raises:
            OptionError: the others cannot be reached.
        """
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        ranks = cls(
            *(int(os.environ.get(name, usual)) for name, usual in zip(names, "010", strict=True))
        )
        if ranks.world > 1:
            ranks._join()
        return ranks

    def _join(self) -> None:
        self._sums_on_cards = torch.accelerator.is_available() and dist.is_nccl_available()
        backend = COLLECTIVES if self._sums_on_cards else "gloo"
        try:
            self._store = PrefixStore(f"p2ptrain/{next(_groups)}", _meeting_point())
            dist.init_process_group(
                backend, store=self._store, rank=self.rank, world_size=self.world, timeout=_WAIT
            )
        except (RuntimeError, ValueError) as error:
            raise OptionError(
                f"rank {self.rank} cannot reach the others: {_first(error)}"
            ) from error
        if self.is_first:
            atexit.register(self._store.set, _OVER, "")

    @property
    def is_first(self) -> bool:
        """Whether this rank reports, evaluates and writes."""
        return self.rank == 0

    @contextmanager
    def together(self) -> Iterator[None]:
        """Every rank does what is inside, which has no meeting in it; where one fails, all do.

        Raises:
            RankFailed: another one has; else what failed here.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        self.agree(failure)

    def agree(self, failure: Exception | None = None, wish: bool = False) -> bool:
        """Whether one of them has the wish. Raises as `together`."""
        if self.world == 1:
            if failure is not None:
                raise failure
            return wish
        said = torch.tensor([math.inf if failure is None else self.rank, -float(wish)])
        self._call(lambda: dist.all_reduce(said, dist.ReduceOp.MIN))
        if math.isfinite(first := said[0].item()):
            self._fail(int(first), failure)
        return said[1].item() < 0

    def meet(
        self, failure: Exception | None, loss: float, alike: int, numbers: Sequence[float]
    ) -> list[float] | None:
        """The sums of loss and numbers; None where the ranks have not the same `alike`.

        Every meeting has as many numbers, so that one that fails need not know which one it is.

        Args:
            alike: a number below 2**20.
        """
        if self.world == 1:
            self.agree(failure)
            return [loss, *numbers]
        mine = [float(failure is not None), alike, alike**2, loss, *numbers]
        said = torch.tensor(mine, dtype=torch.float64)
        self._call(lambda: dist.all_reduce(said))
        failed, once, squared, *sums = said.tolist()
        if failed:
            self.agree(failure)
        return sums if self.world * squared == once**2 else None

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Every tensor becomes the sum over all ranks: the same bits on each."""
        kinds = dict.fromkeys(tensor.dtype for tensor in tensors) if self.world > 1 else ()
        for dtype in kinds:
            some = [tensor for tensor in tensors if tensor.dtype is dtype]
            flat = torch.cat([tensor.reshape(-1) for tensor in some])
            flat = flat if self._sums_on_cards else flat.cpu()
            self._call(lambda flat=flat: dist.all_reduce(flat))  # type: ignore[misc]
            parts = torch.split(flat, [tensor.numel() for tensor in some])
            for tensor, part in zip(some, parts, strict=True):
                tensor.copy_(part.view(tensor.shape))

    def from_first(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those of rank 0, by name, in host memory; of the others only types and shapes count."""
        if self.world == 1:
            return dict(tensors)
        mine = {n: (dtype_name(t.dtype), [*t.shape]) for n, t in tensors.items()}
        found = {}
        for name, (dtype, shape) in self.shared(mine).items():
            if self.is_first:
                content = found[name] = tensors[name].detach().contiguous()
            else:
                content = found[name] = torch.empty(shape, dtype=dtype_named(dtype))
            flat = content.reshape(-1).view(torch.uint8)
            self._call(lambda flat=flat: dist.broadcast(flat, 0))  # type: ignore[misc]
        return found

    def shared(self, value: Any) -> Any:
        """Rank 0's, as JSON has it."""
        return value if self.world == 1 else json.loads(self._text(0, json.dumps(value)))

    def leave(self, *, failed: bool) -> None:
        """The last call. Of a rank that is not the first it returns once rank 0 is over."""
        if self._store is None:
            return
        if not failed:
            dist.destroy_process_group()
        elif not self.is_first:
            try:
                self._store.wait([_OVER], _LAST_WAIT)
            except RuntimeError:  # rank 0 is gone: torchrun reports that
                return

    def _fail(self, rank: int, failure: Exception | None) -> None:
        text = self._text(rank, str(failure) or type(failure).__name__)
        if failure is not None and rank == self.rank:
            raise failure
        raise RankFailed(f"rank {rank} has failed: {text}")

    def _text(self, rank: int, text: str) -> str:
        content = torch.tensor([*text.encode()], dtype=torch.uint8)
        size = torch.tensor([len(content)])
        self._call(lambda: dist.broadcast(size, rank))
        if rank != self.rank:
            content = torch.empty(int(size), dtype=torch.uint8)
        self._call(lambda: dist.broadcast(content, rank))
        return bytes(content.tolist()).decode()

    def _call(self, collective: Callable[[], object]) -> None:
        try:
            collective()
        except RuntimeError as error:
            raise RanksLost(
                f"another rank is gone, and rank {self.rank} cannot go on without it: torchrun "
                "reports which. --checkpoint DIR and --resume DIR keep what was trained"
            ) from error


def _first(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
