"""Whose commands count: nobody obeys a coordinator of the past, however late it wakes up."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fence:
    """The newest command obeyed so far; both numbers only rise.

    Attributes:
        term: of the coordinator that gave it.
        epoch: that it was for.
    """

    term: int = 0
    epoch: int = 0

    def raised(self, term: int, epoch: int) -> Fence:
        """After obeying a command."""
        return Fence(max(term, self.term), max(epoch, self.epoch))

    def refusal(
        self, peer: str, term: int, epoch: int, coordinator: tuple[str, int] | None
    ) -> str | None:
        """Why a coordinator's command is refused; None = it is obeyed.

        Arguments:
            coordinator: id and term of the coordinator that this device follows, None = of none.
        """
        if term < self.term or epoch < self.epoch:
            return (
                f"epoch {epoch} of term {term} is over: epoch {self.epoch} of term {self.term} "
                "was asked for since"
            )
        if coordinator is None:
            return None
        device, known = coordinator
        if term < known:
            return f"term {term} is over: this device follows term {known}"
        if term == known and peer != device:
            return f"another device coordinates term {term}"
        return None
