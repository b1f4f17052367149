"""The device that `remove` means, or who there is to choose from."""

from __future__ import annotations

import pytest

from p2ptrain.errors import UserError
from p2ptrain.mesh.household_trust import DeviceSummary, find_device

_PHONE = DeviceSummary("ab12cd34" * 8, "phone", "laptop", False)
_TWIN = DeviceSummary("ef56ab78" * 8, "phone", "laptop", False)


def test_a_name_or_the_beginning_of_an_id_is_enough() -> None:
    assert find_device("phone", [_PHONE]) is _PHONE
    assert find_device(_TWIN.id[:12], [_PHONE, _TWIN]) is _TWIN


def test_others_are_named() -> None:
    with pytest.raises(UserError, match=r"no paired device is called 'pi': .* of phone \(ab12"):
        find_device("pi", [_PHONE])
    with pytest.raises(UserError, match=r"several paired devices are called 'phone'"):
        find_device("phone", [_PHONE, _TWIN])


def test_where_no_device_is_trusted_nothing_is_offered() -> None:
    with pytest.raises(UserError, match=r"'pi': no other device is paired$"):
        find_device("pi", [])
