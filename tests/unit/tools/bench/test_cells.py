"""Which cells a filter names."""

from __future__ import annotations

import pytest

from tools.bench.cells import HOUSEHOLDS, MODELS, SIZES, SYSTEMS, Cell, UnknownNameError, select


def keys(*patterns: str) -> list[str]:
    return [cell.key for cell in select(patterns)]


def test_no_filter_names_everything_once() -> None:
    every = keys()
    assert len(every) == len(HOUSEHOLDS) * len(MODELS) * len(SIZES) * len(SYSTEMS)
    assert len(set(every)) == len(every)


def test_a_whole_key_names_one_cell() -> None:
    assert keys("B/vit/L/ddp") == ["B/vit/L/ddp"]


def test_parts_left_out_and_stars_stand_for_all() -> None:
    assert keys("A/*/S/pp") == [f"A/{model}/S/pp" for model in MODELS]
    assert keys("A/vit") == keys("A/vit/*/*")


def test_lists_and_several_filters_come_in_the_order_of_measuring_without_doubles() -> None:
    chosen = keys("F/vit/S/pp,ddp", "A/vit/S/pp", "F/vit/S/pp")
    assert chosen == ["A/vit/S/pp", "F/vit/S/ddp", "F/vit/S/pp"]


@pytest.mark.parametrize("pattern", ["Z", "A/vgg", "A/vit/M", "A/vit/S/horovod", "A/vit/S/pp/x"])
def test_a_name_that_does_not_exist_is_said(pattern: str) -> None:
    with pytest.raises(UnknownNameError, match=pattern.rsplit("/", 1)[-1]):
        select([pattern])


def test_a_key_is_read_back() -> None:
    cell = Cell("A", "vit", "L", "pp")
    assert Cell.parse(cell.key) == cell
    assert cell.batch_size == 256
    with pytest.raises(UnknownNameError, match="A/vit"):
        Cell.parse("A/vit")
