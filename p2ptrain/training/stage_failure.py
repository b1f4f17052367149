"""What a device tells the holder when one of its stages fails."""

from __future__ import annotations

from p2ptrain.errors import Error, PeerError, UserError
from p2ptrain.training.budget import is_out_of_memory
from p2ptrain.training.not_finite import NotFinite
from p2ptrain.training.switchboard import FrameRefused

FAILURE_TEXT_LIMIT = 1500


def failure_fields(error: BaseException) -> dict[str, object]:
    """Fields of `train.failed`: the cause, in the words of `HolderEpoch`, and a text for people."""
    if isinstance(error, NotFinite):
        return {
            "cause": "not_finite",
            "message": str(error),
            "step": error.step,
            "micro_batch": error.micro_batch,
            "held_as": error.held_as,
            "is_update": error.is_update,
        }
    if isinstance(error, FrameRefused):
        message = str(error)[:FAILURE_TEXT_LIMIT]
        return {"cause": "refused", "message": message, "sender": error.sender}
    message = str(error) if isinstance(error, Error) else f"{type(error).__name__}: {error}"
    if is_out_of_memory(error):
        message = "it ran out of memory"
    return {"cause": _cause(error), "message": message[:FAILURE_TEXT_LIMIT]}


def _cause(error: BaseException) -> str:
    if is_out_of_memory(error):
        return "memory"
    if isinstance(error, UserError):
        return "user"
    return "peer" if isinstance(error, PeerError) else "bug"
