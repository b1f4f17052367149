"""The reader of PipeDream's text graphs, on small graphs written for these tests."""

from __future__ import annotations

import pytest

from p2ptrain.errors import OptionError
from p2ptrain.plan.types.profile import Profile
from tools.pipedream_graph import linear_order, read_graph, to_profile


def node(name: str, kind: str = "Linear(2, 2)", time: float = 1.0, out: str = "8.0") -> str:
    return (
        f"{name} -- {kind} -- forward_compute_time={time}, backward_compute_time={2 * time}, "
        f"activation_size={out}, parameter_size={40.0 if time else 0.0}"
    )


def graph(*nodes: str, edges: str) -> str:
    pairs = (edge.split(">") for edge in edges.split())
    return "\n".join([*nodes, *(f"\t{a} -- {b}" for a, b in pairs)]) + "\n"


def test_a_chain_in_any_line_order_keeps_its_times_and_sizes_per_sample() -> None:
    text = graph(node("c", out="4.0"), node("a"), node("b", time=3), edges="a>b b>c")
    profile = to_profile(read_graph(text), "chain", batch_size=4)
    assert [unit.name for unit in profile.units] == ["a", "b", "c"]
    assert [unit.output_bytes for unit in profile.units] == [2, 2, 0]
    assert [unit.activation_bytes for unit in profile.units] == [2, 2, 1]
    assert [unit.parameter_bytes for unit in profile.units] == [40, 40, 40]
    assert profile.times.sizes == (4,)
    assert profile.times.at(4).forward == pytest.approx((0.001, 0.003, 0.001))
    assert profile.times.at(4).backward == pytest.approx((0.002, 0.006, 0.002))


def test_a_tensor_used_twice_crosses_a_cut_once() -> None:
    text = graph(*map(node, "abcd"), edges="a>b a>c b>d c>d")
    profile = to_profile(read_graph(text), "diamond", batch_size=1)
    assert [unit.output_bytes for unit in profile.units] == [8, 16, 16, 0]


def test_a_skipped_tensor_crosses_every_cut_until_its_last_use() -> None:
    text = graph(*map(node, "abcd"), edges="a>b b>c c>d a>d")
    profile = to_profile(read_graph(text), "residual", batch_size=1)
    assert [unit.output_bytes for unit in profile.units] == [8, 16, 16, 0]


def test_a_branch_is_finished_before_the_next_begins() -> None:
    wide = graph(
        node("a"), *(node(name) for name in ("x1", "y1", "x2", "y2", "z")),
        edges="a>x1 a>y1 x1>x2 y1>y2 x2>z y2>z",
    )  # fmt: skip
    order = linear_order(read_graph(wide))
    assert order in (["a", "x1", "x2", "y1", "y2", "z"], ["a", "y1", "y2", "x1", "x2", "z"])


def test_the_branch_that_shrinks_goes_first() -> None:
    text = graph(
        node("a", out="100"), node("big", out="90"), node("small", out="5"), node("z"),
        edges="a>big a>small big>z small>z",
    )  # fmt: skip
    assert linear_order(read_graph(text)) == ["a", "small", "big", "z"]


def test_several_outputs_of_a_node_are_added_and_its_pieces_join_it() -> None:
    lstm = node("a", "LSTM(2, 2)", out="[6.0; 1.0; 1.0]")
    piece = node("p", "__getitem__(0)", time=0, out="6.0")
    unused = node("q", "__getitem__(1)", time=0, out="1.0")
    profile = to_profile(
        read_graph(graph(lstm, piece, unused, node("b"), edges="a>p a>q p>b")), "lstm", 1
    )
    assert [unit.name for unit in profile.units] == ["a", "b"]
    assert [unit.output_bytes for unit in profile.units] == [6, 0]
    assert profile.units[0].activation_bytes == 8


def test_free_nodes_before_the_first_timed_one_join_it() -> None:
    text = graph(node("v", "View(-1)", time=0), node("a"), node("b"), edges="v>a a>b")
    profile = to_profile(read_graph(text), "view", 1)
    assert [unit.parameter_bytes for unit in profile.units] == [40, 40]


def test_what_overwrites_its_input_keeps_nothing_of_its_own() -> None:
    text = graph(node("a"), node("r", "ReLU(inplace)"), node("b"), edges="a>r r>b")
    profile = to_profile(read_graph(text), "relu", 1)
    assert [unit.activation_bytes for unit in profile.units] == [8, 0, 8]
    assert [unit.output_bytes for unit in profile.units] == [8, 8, 0]


def test_inputs_are_no_units_but_what_the_holder_sends() -> None:
    text = graph(node("i", "Input", time=17.0, out="48.0"), node("a"), node("b"), edges="i>a a>b")
    profile = to_profile(read_graph(text), "input", batch_size=4)
    assert profile.input_bytes == 12
    assert [unit.name for unit in profile.units] == ["a", "b"]
    assert profile.times.at(4).forward == pytest.approx((0.001, 0.001))


def test_a_partitioned_graph_s_stage_numbers_are_ignored() -> None:
    text = graph(f"{node('a')} -- stage_id=0", f"{node('b')} -- stage_id=1", edges="a>b")
    assert len(to_profile(read_graph(text), "staged", 1).units) == 2


def test_a_description_may_hold_dashes_and_commas() -> None:
    text = graph(node("a", "Odd(  (x): Linear -- y, z)"), edges="")
    assert read_graph(text).nodes["a"].kind == "Odd(  (x): Linear -- y, z)"


def test_what_is_written_can_be_read_as_a_profile() -> None:
    profile = to_profile(read_graph(graph(*map(node, "ab"), edges="a>b")), "two", 2)
    assert Profile.from_json(profile.to_json()) == profile


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", "no node"),
        ("node1 -- Linear\n", "line 1"),
        (node("a").replace("=1.0", "=soon"), "soon"),
        (node("a").replace("=1.0", "=-1.0"), "-1.0"),
        (node("a").replace("=1.0", "=nan"), "nan"),
        (graph(node("a"), edges="a>b"), '"b"'),
        (graph(node("a"), edges="") + "\ta b\n", "line 2"),
    ],
)
def test_a_bad_line_is_named(text: str, names: str) -> None:
    with pytest.raises(OptionError, match=names):
        read_graph(text)


def test_a_circle_is_named() -> None:
    text = graph(*map(node, "abc"), edges="a>b b>c c>b")
    with pytest.raises(OptionError, match="b, c"):
        linear_order(read_graph(text))
