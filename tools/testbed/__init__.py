"""An emulated household on one machine: devices with a share of a core, memory and a cable each.

    household = Household.load("B")
    with Testbed(household) as testbed:
        device = testbed["nx-1"]
        device.popen(["p2ptrain", "join"])
        device.set_rate(10)

Needs root, Linux, iproute2 and util-linux; elsewhere entering a `Testbed` says so.
"""

from tools.testbed.device import EmulatedDevice
from tools.testbed.errors import HouseholdError, TestbedError
from tools.testbed.household import DeviceDescription, Household
from tools.testbed.testbed import Testbed

__all__ = [
    "DeviceDescription",
    "EmulatedDevice",
    "Household",
    "HouseholdError",
    "Testbed",
    "TestbedError",
]
