"""How far a loader was that can say it, written down beside the journal once a second.

So a holder that is started again need not pass over the batches that count. What a loader says is
its own: numbers, texts, bytes, tensors, and containers of these are written; of anything else
nothing is, and the batches are passed over.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, Protocol

import numpy
import torch
from torch import Tensor

from p2ptrain.aio.tasks import run_in_background
from p2ptrain.errors import ProtocolError, UserError
from p2ptrain.holder.input.random_streams import States
from p2ptrain.logs import get_logger
from p2ptrain.mesh.identity.state_folder import StateFolder
from p2ptrain.net.forms import By, Count, Id, Length, write_form
from p2ptrain.net.read_form import read_form

log = get_logger(__name__)

PLACES_FILE = "loader.json"

MOST_ENDS = 1_000_000

MOST_PLACES = 2

EVERY_SECONDS = 1.0


class NotPlain(TypeError):
    """A loader says something that no file holds."""


def to_plain(value: Any) -> Any:
    """As JSON has it. Raises NotPlain."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, Tensor):
        array = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        kind = str(value.dtype).removeprefix("torch.")
        return {"tensor": [kind, list(value.shape), to_plain(array.tobytes())]}
    if isinstance(value, numpy.ndarray) and value.dtype.kind in "biufc":
        return {"array": [value.dtype.str, list(value.shape), to_plain(value.tobytes())]}
    if isinstance(value, numpy.generic):
        return to_plain(value.item())
    if isinstance(value, tuple):
        return {"tuple": [to_plain(item) for item in value]}
    if isinstance(value, list):
        return [to_plain(item) for item in value]
    if isinstance(value, dict):
        return {"dict": [[to_plain(key), to_plain(item)] for key, item in value.items()]}
    raise NotPlain(f"a {type(value).__name__}")


def from_plain(value: Any) -> Any:
    """What `to_plain` was given. Raises ProtocolError: it is nothing of that kind."""
    if isinstance(value, list):
        return [from_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    try:
        ((kind, held),) = value.items()
        match kind:
            case "bytes":
                return base64.b64decode(held, validate=True)
            case "tuple":
                return tuple(from_plain(held))
            case "dict":
                return {from_plain(key): from_plain(item) for key, item in held}
            case "tensor":
                made = torch.frombuffer(bytearray(from_plain(held[2])), dtype=torch.uint8)
                return made.view(getattr(torch, held[0])).reshape(held[1])
            case "array":
                content = numpy.frombuffer(from_plain(held[2]), numpy.dtype(held[0]))
                return content.reshape(held[1]).copy()
    except (ValueError, TypeError, AttributeError, RuntimeError, IndexError) as error:
        raise ProtocolError(f"it holds what no loader says: {error}") from error
    raise ProtocolError(f"it holds what no loader says: {kind!r}")


@dataclass(frozen=True, slots=True)
class LoaderPlace:
    """How far a loader is that can say it (`state_dict`) and go on from there (`load_state_dict`).

    Attributes:
        step: of the batch that comes next.
        epoch: from 0.
        number: of the batch that comes next, in its epoch.
        ends: numbers of updates that have completed an epoch before it.
        loader: its `state_dict`.
        streams: of random numbers that it draws in this process.
    """

    step: Count
    epoch: Count
    number: Count
    ends: Annotated[tuple[Count, ...], Length(MOST_ENDS)]
    loader: Annotated[Any, By(from_plain, to_plain)]
    streams: Annotated[States, By(from_plain, to_plain)]


class HasPlaces(Protocol):
    """What is read may be gone on with in the middle."""

    @property
    def places(self) -> Sequence[LoaderPlace]:
        """From which a read may begin; none where nothing says any."""

    def recall(self, places: Sequence[LoaderPlace]) -> None:
        """Those of an earlier process."""


@dataclass(frozen=True, slots=True)
class _PlacesFile:
    format: Literal["p2ptrain.loader/1"]
    job: Id
    places: Annotated[tuple[LoaderPlace, ...], Length(MOST_PLACES)]


def newest_before(places: Sequence[LoaderPlace], step: int) -> LoaderPlace | None:
    """From which the batch of update `step`, and whether it ends its epoch, is reached first."""
    return max((p for p in places if p.step <= step), key=lambda p: p.step, default=None)


async def keep(
    folder: StateFolder | None,
    job: str,
    batches: HasPlaces,
    steps: Callable[[], Sequence[int]],
    every_seconds: float = EVERY_SECONDS,
) -> None:
    """Until cancelled, once a second.

    Args:
        steps: updates after which a later process may have to go on.
    """
    written: set[int] = set()
    while folder is not None:
        await asyncio.sleep(every_seconds)
        found = {
            place.step: place
            for place in (newest_before(batches.places, step - 1) for step in steps())
            if place is not None
        }
        if not found or written == found.keys():
            continue
        written = set(found)
        places = tuple(found.values())[-MOST_PLACES:]
        try:
            form = write_form(_PlacesFile("p2ptrain.loader/1", job, places))
        except NotPlain as error:
            log.info("loader_not_noted", why=str(error))
            return
        try:
            await run_in_background(partial(folder.write_json, PLACES_FILE, form))
        except (OSError, UserError) as error:
            log.warning("loader_not_noted", why=str(error))


def forget(folder: StateFolder | None) -> None:
    """The job is over; a disk that refuses that is only logged."""
    try:
        if folder is not None:
            folder.remove(PLACES_FILE)
    except OSError as error:
        log.warning("loader_not_removed", why=str(error))


def recall(folder: StateFolder | None, job: str, batches: HasPlaces) -> None:
    """Have it go on from what was written down of that job, if anything was."""
    if folder is None:
        return
    try:
        written = folder.read_form(PLACES_FILE, _PlacesFile)
    except UserError as error:
        log.warning("loader_unreadable", why=str(error))
        return
    if written is not None and written.job == job:
        batches.recall(written.places)


def of_checkpoint(batches: HasPlaces, step: int) -> dict[str, Any] | None:
    """What a checkpoint after so many updates says of it; None where it says nothing."""
    place = newest_before(batches.places, step - 1)
    try:
        return None if place is None else write_form(place)
    except NotPlain:
        return None


def from_checkpoint(batches: HasPlaces, said: Any) -> None:
    """Have it go on from there. Raises ProtocolError: it is damaged."""
    if said is not None:
        batches.recall((read_form(LoaderPlace, said, "the loader's place", extra=True),))
