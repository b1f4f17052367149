from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from tools import darknet
from tools.darknet.cfg import CfgError, parse, read_cfg
from tools.darknet.network import Darknet

YOLOV2 = Path(darknet.__file__).parent / "yolov2_first16.cfg"
SAMPLE = """
[net]            ; the size of the images
width = 20
height=12
channels=2

[convolutional]  # layer 0
batch_normalize=1
filters=4
size=3
stride=2
pad=1
activation=leaky

[convolutional]
filters=4
size=1
activation=linear

[shortcut]
from=-2
activation=relu

[maxpool]
size=2
stride=1

[route]
layers=-1,2

[route]
layers=-1
groups=2
group_id=1

[upsample]
stride=2

[region]
classes=3
"""


def test_a_file_of_all_kinds_of_layers() -> None:
    torch.manual_seed(0)
    network = Darknet(parse(SAMPLE))
    assert network.input_shape == (2, 12, 20)
    assert network.output_shape == (4, 12, 20)
    x = torch.randn(3, *network.input_shape)
    made = network(x)
    first, second = network.layers[0], network.layers[1]
    a = functional.leaky_relu(first[1](functional.conv2d(x, first[0].weight, None, 2, 1)), 0.1)
    b = functional.conv2d(a, second[0].weight, second[0].bias)
    c = functional.relu(a + b)
    d = functional.max_pool2d(functional.pad(c, (0, 1, 0, 1), value=-torch.inf), 2, 1)
    half = torch.cat([d, c], 1)[:, 4:]
    torch.testing.assert_close(made, functional.interpolate(half, scale_factor=2))
    assert made.shape[1:] == network.output_shape


def test_yolov2_up_to_layer_16() -> None:
    with torch.device("meta"):
        network = Darknet(read_cfg(YOLOV2))
        made = network(torch.empty(1, *network.input_shape))
    assert len(network.layers) == 16
    assert tuple(made.shape[1:]) == network.output_shape == (256, 26, 26)
    filters = [m.weight for m in network.modules() if isinstance(m, nn.Conv2d)]
    assert sum(weight.numel() for weight in filters) * 4 == 13_675_904
    with torch.device("meta"):
        assert Darknet(read_cfg(YOLOV2), 4).output_shape == (64, 104, 104)


@pytest.mark.parametrize("side", [12, 13])
@pytest.mark.parametrize(("size", "stride"), [(2, 2), (2, 1), (3, 2), (3, 1), (4, 2), (5, 1)])
def test_pooling_pads_as_darknet_does(side: int, size: int, stride: int) -> None:
    """`size` - 1 positions in all, the odd one behind; padding is never the largest."""
    text = (
        f"[net]\nwidth={side}\nheight={side}\nchannels=1\n[maxpool]\nsize={size}\nstride={stride}"
    )
    network = Darknet(parse(text))
    x = -torch.rand(1, 1, side, side)
    made = network(x)
    low = (size - 1) // 2
    count = (side - 1) // stride + 1
    assert network.output_shape == (1, count, count)
    rows = [slice(max(o * stride - low, 0), o * stride - low + size) for o in range(count)]
    expected = torch.stack([torch.stack([x[0, 0, r, c].max() for c in rows]) for r in rows])
    assert torch.equal(made[0, 0], expected)


NET = "[net]\nwidth=8\nheight=8\n"
HALVED = "[maxpool]\nstride=2\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("width=3", "line 1: width= stands before any section"),
        ("[convolutional]\nfilters=3", "first section must be"),
        ("", "first section must be"),
        (NET + "[maxpool\nsize=2", "line 4: no closing bracket"),
        (NET + "[maxpool]\nsize", "line 5: expected key=value"),
        (NET + "[maxpool]\nsize=2\nsize=3", r"line 6: size= stands twice in \[maxpool\]"),
        (NET, "followed by no layer"),
        (NET + "[yolo]\n", "followed by no layer"),
        ("[net]\nheight=3\n[maxpool]", r"line 1: \[net\] needs width="),
        (NET + "[reorg]\nstride=2", r"line 4: \[reorg\] is not read here"),
        (NET + "[convolutional]\nsize=big", "size=big is not a whole number"),
        (NET + "[convolutional]\nsize=0", "size=0 must be at least 1"),
        (NET + "[convolutional]\ngroups=2", "divides 3 channels into 2 groups"),
        (NET + "[convolutional]\nsize=9", "would make a map of shape"),
        (NET + "[convolutional]\nactivation=odd", "activation=odd is not among"),
        (NET + "[maxpool]\n[route]\nlayers=-2", "names layer -2, but it is layer 1 itself"),
        (NET + "[maxpool]\n[route]\nlayers=x", "layers=x is not a list"),
        (NET + 2 * HALVED + "[route]\nlayers=0,1", "different sizes"),
        (NET + "[maxpool]\n[route]\nlayers=0\ngroups=3\ngroup_id=3", "takes group 3 of 3"),
        (
            NET + 2 * HALVED + "[shortcut]\nfrom=0",
            "adds maps of shapes",
        ),
        (NET + "[shortcut]\nfrom=-1", "has no layer before it"),
        (NET + "[dropout]\nprobability=2", "not between 0 and 1"),
        (NET + "[dropout]\nprobability=nan", "not between 0 and 1"),
        (NET + "[maxpool]\nmaxpool_depth=1", r"line 4: \[maxpool\] maxpool_depth=1 is not read"),
        (NET + "[conv]\nstride_x=2", "stride_x=2 is not read here"),
        (NET + "[conv]\nshare_index=0", "share_index=0 is not read here"),
        (NET + "[connected]\nbatch_normalize=1", "batch_normalize=1 is not read here"),
        (NET + 2 * HALVED + "[shortcut]\nfrom=-2\nalpha=0.5", "alpha=0.5 is not read here"),
        (NET + "[softmax]\ngroups=2", "groups=2 is not read here"),
        (NET + "[softmax]", "over all of a map of shape"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(text: str, message: str) -> None:
    with pytest.raises(CfgError, match=message):
        Darknet(parse(text))


def test_keys_that_change_nothing_are_passed_over() -> None:
    text = (
        NET
        + "[conv]\nantialiasing=0\nlearning_rate=0.1\n[avgpool]\n[softmax]\ngroups=1\nnoloss=1\n"
    )
    assert Darknet(parse(text)).output_shape == (1, 1, 1)
    assert Darknet(parse(NET + "[softmax]\nspatial=1")).output_shape == (3, 8, 8)


def test_comments_may_be_in_any_encoding(tmp_path: Path) -> None:
    """A mark of the byte order in front, as some editors write it, is none of the text."""
    path = tmp_path / "net.cfg"
    for mark, comment in ((b"\xef\xbb\xbf", "\u5c42".encode()), (b"", b"caf\xe9")):
        path.write_bytes(mark + NET.encode() + b"# " + comment + b"\n[maxpool]\n")
        assert len(read_cfg(path)) == 2


def test_layers_are_counted() -> None:
    sections = parse(SAMPLE)
    assert len(Darknet(sections, 3).layers) == 3
    with pytest.raises(CfgError, match="has 8 layers behind it, not 9"):
        Darknet(sections, 9)
    with pytest.raises(CfgError, match=r"\[region\] is a loss; it is layer 7"):
        Darknet(sections, 8)


def test_what_ends_a_classifier() -> None:
    text = NET + "[avgpool]\n[dropout]\n[connected]\noutput=5\nactivation=linear\n[softmax]\n[cost]"
    network = Darknet(parse(text)).eval()
    made = network(torch.rand(2, 3, 8, 8))
    assert tuple(made.shape) == (2, 5, 1, 1)
    torch.testing.assert_close(made.sum(1), torch.ones(2, 1, 1))
