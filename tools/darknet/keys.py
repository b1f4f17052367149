"""Keys of a layer's section: what is not read, and would change the layer, is an error."""

from __future__ import annotations

from collections.abc import Mapping

from tools.darknet.cfg import Section


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


READ: Mapping[str, frozenset[str]] = {
    "convolutional": _words(
        "filters size stride pad padding dilation groups batch_normalize activation"
    ),
    "maxpool": _words("size stride padding"),
    "avgpool": _words(""),
    "route": _words("layers groups group_id"),
    "shortcut": _words("from activation"),
    "upsample": _words("stride"),
    "dropout": _words("probability"),
    "connected": _words("output activation"),
    "softmax": _words("spatial"),
}
TRAINING = _words(
    "stopbackward onlyforward learning_rate clip dont_update burnin_update train_only_bn dontload "
    "dontloadscales dontsave numload noloss"
)
"""They say how Darknet trains, or what it loads and saves."""
_FACTORS = _words("groups temperature scale alpha beta")
"""1 changes nothing."""


def check_keys(section: Section) -> None:
    """Of a layer that is read. CfgError names the key."""
    known = READ["convolutional" if section.name == "conv" else section.name] | TRAINING
    for key, value in section.values.items():
        if key not in known and not _changes_nothing(key, value):
            raise section.error(f"{key}={value} is not read here")


def _changes_nothing(key: str, value: str) -> bool:
    if value in ("0", "none"):
        return key != "share_index"  # which is a layer's number
    try:
        return key in _FACTORS and float(value) == 1.0
    except ValueError:
        return False
