"""Which copies are called which version where stages go on from whatever they have."""

from __future__ import annotations

from dataclasses import replace

import pytest

from p2ptrain.errors import ProtocolError
from p2ptrain.training.recovery.change import ChangeAsk, Reason
from p2ptrain.training.recovery.change_core import ChangeCore
from p2ptrain.training.recovery.change_events import AskInventory, InventoryIn, MakePlan
from p2ptrain.training.recovery.choose import Past
from p2ptrain.training.recovery.holdings import Holding, Inventory, Kind
from p2ptrain.training.recovery.lineage import Era, Lineage
from p2ptrain.training.recovery.mixture import Mix, Part, mixture, read_to_be_made
from p2ptrain.training.recovery.placed import Placed, PlacedStage
from p2ptrain.training.recovery.version import Version

EPOCH = 5
LINEAGE = Lineage((Era(EPOCH, 20, 0),))
PAST = Past(LINEAGE, reported=40, asynchronous=True)
PLACED = Placed(
    epoch=EPOCH,
    holder="a",
    version=Version(20, 0),
    lineage=LINEAGE,
    stages=(PlacedStage(0, 2, ("a",)), PlacedStage(2, 4, ("b",)), PlacedStage(4, 6, ("c",))),
)


def v(step: int) -> Version:
    return Version(step, EPOCH)


A = Inventory(
    "a",
    holdings=(
        Holding(0, 2, v(41), Kind.LIVE),
        Holding(0, 2, v(30), Kind.KEPT),
        Holding(4, 6, v(30), Kind.REPLICA),
    ),
    linked=frozenset({"c"}),
)
C = Inventory(
    "c",
    holdings=(
        Holding(4, 6, v(43), Kind.LIVE),
        Holding(4, 6, v(30), Kind.KEPT),
        Holding(2, 4, v(20), Kind.REPLICA),
        Holding(2, 4, v(30), Kind.REPLICA),
    ),
    linked=frozenset({"a"}),
)
MIXED = (
    Mix("a", (Part(0, 2, v(41)),), v(40)),
    Mix("c", (Part(2, 4, v(30)), Part(4, 6, v(43))), v(40)),
)


def test_live_stages_stay_as_they_are_and_a_lost_one_is_its_newest_replica() -> None:
    assert mixture(6, {"a": A, "c": C}, PAST, PLACED) == MIXED


def test_what_has_the_version_already_is_called_nothing_else() -> None:
    here = replace(C, holdings=(Holding(4, 6, v(40), Kind.LIVE), *C.holdings[2:]))
    assert mixture(6, {"a": A, "c": here}, PAST, PLACED) == (
        MIXED[0],
        Mix("c", (Part(2, 4, v(30)),), v(40)),
    )


def test_there_is_none_where_a_unit_is_nowhere_or_no_step_was_made() -> None:
    assert mixture(6, {"a": A}, PAST, PLACED) == ()
    assert mixture(6, {"a": A, "c": C}, replace(PAST, reported=20), PLACED) == ()
    assert mixture(6, {"a": A, "c": C}, PAST, None) == ()


@pytest.mark.parametrize("reason", [Reason.FAILURE, Reason.LEAVE])
def test_devices_are_asked_once_and_then_go_on_from_it(reason: Reason) -> None:
    """Only after a failure: else all are at one version."""
    alive = frozenset({"a", "c"})
    ask = ChangeAsk(9, 9, reason, 6, "a", alive, PAST, present=PLACED)
    core = ChangeCore(ask, alive, mixes=True)
    core.start()
    core.handle(InventoryIn(9, A))
    asked = core.handle(InventoryIn(9, C))
    if reason is Reason.LEAVE:
        (plan,) = asked
        assert isinstance(plan, MakePlan)
        assert plan.choice.version == v(30)
        return
    assert asked == [AskInventory(one.device, 9, rebuild=one) for one in MIXED]
    for stock, mix in ((A, MIXED[0]), (C, MIXED[1])):
        (*_, last) = (None, *core.handle(InventoryIn(9, with_more(stock, mix))))
    assert isinstance(last, MakePlan)
    assert (last.choice.version, last.choice.replayed) == (v(40), 0)
    assert last.choice.places == (("a",), ("a",), ("c",), ("c",), ("c",), ("c",))


def test_who_could_not_do_it_is_gone_back_from() -> None:
    alive = frozenset({"a", "c"})
    ask = ChangeAsk(9, 9, Reason.FAILURE, 6, "a", alive, PAST, present=PLACED)
    core = ChangeCore(ask, alive, mixes=True)
    core.start()
    for stock in (A, C, with_more(A, MIXED[0])):
        core.handle(InventoryIn(9, stock))
    (plan,) = core.handle(InventoryIn(9, C))
    assert isinstance(plan, MakePlan)
    assert plan.choice.version == v(30)


def with_more(stock: Inventory, mix: Mix) -> Inventory:
    return replace(stock, holdings=(*stock.holdings, *mix.made))


def test_it_travels() -> None:
    for mix in MIXED:
        assert read_to_be_made(mix.device, {"mix": mix.fields()}) == mix
    assert read_to_be_made("a", {}) is None
    good = MIXED[0].fields()
    for wrong in ({"parts": []}, {"parts": [[2, 2, [1, 1]]]}, {"target": []}, {"device": "x"}):
        with pytest.raises(ProtocolError):
            read_to_be_made(MIXED[0].device, {"mix": {**good, **wrong}})
