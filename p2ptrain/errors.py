"""Every error that p2ptrain raises on purpose, as one small tree.

    Error
    ├── UserError: the user must change something
    │   ├── OptionError     an option, a field of a Job or file; DeviceUnusable: a `--device`
    │   ├── ScriptError     the training script or the data set
    │   ├── CaptureError    the model cannot be exported; names the user's own line
    │   ├── PlanError       no plan fits the devices; names the unit or the budget
    │   ├── TrainingError   training itself failed (NaN loss, disk full)
    │   └── TooLarge        a model needs more memory, or work, than a device offers
    ├── PeerError: another device, or the network between us
    │   ├── ProtocolError   a peer sent what the protocol forbids; NotItsPart: for another device
    │   ├── LinkClosed      the link to a peer ended while it was needed
    │   ├── NotPaired, PairingError, VersionMismatch, NotInCharge, DeviceLost
    ├── AcceleratorFailed: the graphics card or its driver has stopped working
    ├── RunCancelled: a run that the app has cancelled
    └── InternalError: a bug of ours, please report it

A message says what happened, to which device, and what the user can do. `UserError` and `PeerError`
are shown without a traceback; `InternalError` and every other exception are bugs.
"""

from __future__ import annotations


class Error(Exception):
    """Base of the tree; never raised itself."""


class UserError(Error):
    """What the user asked for cannot be done."""


class OptionError(UserError):
    """An option, a field of a Job or a field of a file has an unusable value."""


class DeviceUnusable(OptionError):
    """The accelerator that was asked for is not here, or cannot compute; says what to do."""


class ScriptError(UserError):
    """The training script or its data set is unusable."""


class CaptureError(UserError):
    """`torch.export` cannot take the model; the message names the user's own line."""


class PlanError(UserError):
    """No plan fits; the message names the unit or the memory budget that cannot be met."""


class TrainingError(UserError):
    """Training itself went wrong: a loss that is not finite, a full disk."""


class TooLarge(UserError, MemoryError):
    """What a model computes does not fit a device; known before any of it has run."""


class PeerError(Error):
    """Another device, or the network between us and it."""


class ProtocolError(PeerError):
    """A peer sent what the protocol forbids. The code that catches it closes the link."""


class NotItsPart(ProtocolError):
    """A peer sent what only another device may send, as far as the plan in force says."""


class LinkClosed(PeerError):
    """The link to a peer ended while something was being sent or awaited."""


class NotPaired(PeerError):
    """One of the two sides does not know the other."""


class PairingError(PeerError):
    """A pairing attempt failed."""


class VersionMismatch(PeerError):
    """The other side runs another protocol version."""


class NotInCharge(PeerError):
    """The asking device holds the data of no job here, and this one plans for no others."""


class DeviceLost(PeerError):
    """A device that the job needs is gone.

    Attributes:
        name: the lost device's name, as members show it.
    """

    def __init__(self, message: str, *, name: str) -> None:
        super().__init__(message)
        self.name = name


class AcceleratorFailed(Error):
    """An accelerator of this device, or its driver, has stopped working."""

    @classmethod
    def of(cls, name: str, error: BaseException) -> AcceleratorFailed:
        """From what torch raises of it."""
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        failed = cls(f"{name} has failed: {first}")
        failed.__cause__ = error
        return failed


class RunCancelled(Error):
    """The training was cancelled by `Run.cancel`, or its node has left."""


class InternalError(Error):
    """A bug of ours."""


_CALLBACK = "the callback "


def note_callback(error: BaseException, message: str) -> BaseException:
    """The same error, with a note that says in which callback of the job it was raised."""
    if message not in getattr(error, "__notes__", ()):
        error.add_note(message)
    return error


def callback_note(error: BaseException) -> str | None:
    """That note; None where no callback has raised it."""
    notes = (note for note in getattr(error, "__notes__", ()) if isinstance(note, str))
    return next((note for note in notes if note.startswith(_CALLBACK)), None)


_UNITS = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


def size_text(size_bytes: float) -> str:
    """Such as `1.07 GB`, `410 MB` or `18 bytes`."""
    for unit, name in _UNITS:
        if size_bytes >= 0.9995 * unit:
            return f"{float(f'{size_bytes / unit:.3g}'):,.12g} {name}"
    return "1 byte" if round(size_bytes) == 1 else f"{size_bytes:.0f} bytes"
