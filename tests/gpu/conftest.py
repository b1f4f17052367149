"""The accelerator that these tests run on, or loud words that there is none.

P2PTRAIN_TEST_DEVICE=cuda:1 chooses one. With `cpu` the tests run on the processor, with `twin` on
the twin of an accelerator as far as they can; that shows that they are right, not what a card does.
"""

from __future__ import annotations

import os

import pytest

from p2ptrain.devices.interface import ComputeDevice
from p2ptrain.devices.probes import PROBES, make_accelerator
from p2ptrain.devices.processor import HOST
from tests.support.twin_device import TwinDevice

CHOSEN = "P2PTRAIN_TEST_DEVICE"


@pytest.fixture(scope="session")
def card() -> ComputeDevice:
    """See the module; skips where there is none."""
    name = os.environ.get(CHOSEN, "")
    if name == HOST.name:
        return HOST
    if name == "twin":
        return TwinDevice()
    if not name:
        probes = [probe() for probe in PROBES.values()]
        usable = [one.name for probe in probes for one in probe.found if not one.unusable]
        if not usable:
            why = "; ".join(probe.absent for probe in probes if probe.absent)
            pytest.skip(f"NOT TESTED on an accelerator: {why}")
        name = usable[0]
    return make_accelerator(name)
