"""What tests on real devices and on emulated households ask for."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.system.household import Household
from tools.testbed import Testbed, TestbedError
from tools.testbed.network import private_network


@pytest.fixture
async def household(tmp_path: Path) -> AsyncIterator[Household]:
    """Devices of this machine, where it may be on a network that nobody else hears."""
    with private_network() as prefix:
        async with Household(tmp_path, prefix=prefix, load=False) as household:
            yield household


@pytest.fixture(scope="session")
def emulation() -> None:
    """Skip where namespaces can be made, but no control groups (some containers)."""
    try:
        with Testbed.of_shares((1.0,)):
            pass
    except (OSError, TestbedError) as error:
        pytest.skip(f"NOT TESTED: no emulated household can be made here: {error}")
