"""What `--device` asks for. It is read without torch, which loads long after the command line."""

from __future__ import annotations

import re
from dataclasses import dataclass

from p2ptrain.errors import OptionError

MACHINE_VARIABLE = "P2PTRAIN_MACHINE"
"""In the environment of members that compute on one machine's devices: the same for all of them."""

AUTO, HOST_NAME = "auto", "cpu"

CHOICES = "auto|cpu|cuda[:N]|mps|xpu"

SEVERAL = "cuda:0,cuda:1"

_FAMILIES = (AUTO, HOST_NAME, "cuda", "mps", "xpu")

_COUNTED = ("cuda", "xpu")

_SHAPE = re.compile(r"([a-z]+)(?::([0-9]{1,4}))?", re.ASCII)

_MEANT = {
    "gpu": "auto, or  cuda  for NVIDIA and AMD, mps for Apple, xpu for Intel",
    "nvidia": "cuda",
    "rocm": "cuda, which is torch's word for AMD's cards too",
    "hip": "cuda, which is torch's word for AMD's cards too",
    "amd": "cuda, which is torch's word for AMD's cards too",
    "metal": "mps",
    "apple": "mps",
    "intel": "xpu",
}


@dataclass(frozen=True, slots=True)
class DeviceRequest:
    """An accelerator, the processor, or whichever is better.

    Attributes:
        family: "auto", "cpu", "cuda", "mps" or "xpu".
        index: of several of one family; None: the best of them.
    """

    family: str = AUTO
    index: int | None = None

    def __str__(self) -> str:
        return self.family if self.index is None else f"{self.family}:{self.index}"


def read_requests(text: str) -> tuple[DeviceRequest, ...]:
    """Several with commas between them, each accelerator once.

    Raises:
        OptionError: one is none, or stands there twice, or `auto` beside others.
    """
    found = tuple(read_request(part.strip()) for part in text.split(","))
    cards = [one for one in found if one.family != HOST_NAME]
    if len({*cards}) < len(cards):
        raise OptionError(f"{text!r} has one device twice")
    families = [one.family for one in cards]
    if len(found) > 1 and AUTO in families:
        raise OptionError(f"{text!r}: auto is one device, so name each of several")
    unnumbered = {one.family for one in cards if one.index is None}
    if any(families.count(family) > 1 for family in unnumbered):
        raise OptionError(f"{text!r}: several of one family need their numbers, such as {SEVERAL}")
    return found


def read_request(text: object) -> DeviceRequest:
    """The request that a text such as "cuda:1" stands for.

    Raises:
        OptionError: it is none.
    """
    if not isinstance(text, str):
        raise OptionError(f"device must be a text such as auto or cpu, not {text!r}")
    if "," in text:
        raise OptionError(
            f"{text!r} is more than one device, and a Node has one; `p2ptrain join` and `train` "
            "start one more member for each"
        )
    match = _SHAPE.fullmatch(text)
    if match is None or match[1] not in _FAMILIES:
        meant = _MEANT.get(text.partition(":")[0].lower())
        hint = f": take {meant}" if meant else ""
        raise OptionError(f"{text!r} is no device of {CHOICES}{hint}")
    if match[2] is not None and match[1] not in _COUNTED:
        raise OptionError(f"{text!r}: there is only one {match[1]}, without a number")
    return DeviceRequest(match[1], None if match[2] is None else int(match[2]))
