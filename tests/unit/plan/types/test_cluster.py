from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given

from p2ptrain.errors import OptionError
from p2ptrain.plan.types.cluster import Cluster, ClusterLink
from tests.support import planning_examples

CONTENT: dict[str, Any] = {
    "format": "p2ptrain.cluster/1",
    "devices": [
        {"name": "laptop", "memory_bytes": 4000000000, "slowdown": 1.0, "holder": True},
        {
            "name": "pi",
            "memory_bytes": 1000000000,
            "slowdown": 3.3,
            "times": {"16": {"forward": [0.03], "backward": [0.06]}},
        },
    ],
    "default_link": {"bytes_per_s": 12500000, "latency_s": 0.001},
    "links": [{"from": "laptop", "to": "pi", "bytes_per_s": 6000000, "latency_s": 0.002}],
}
LINK = {"bytes_per_s": 1, "latency_s": 0}


def changed(**fields: object) -> dict[str, Any]:
    return copy.deepcopy(CONTENT) | fields


def device(**fields: object) -> dict[str, Any]:
    return {"name": "a", "memory_bytes": 1, "holder": True} | fields


def test_the_contract_example_reads_and_writes_back() -> None:
    cluster = Cluster.from_json(CONTENT)
    assert cluster.holder.name == "laptop"
    assert cluster.link("laptop", "pi") == ClusterLink(6e6, 0.002)
    assert cluster.link("pi", "laptop") == ClusterLink(12.5e6, 0.001)
    assert cluster.to_json() == CONTENT


def test_slowdown_holder_and_links_have_defaults() -> None:
    content = {"format": CONTENT["format"], "devices": [device()]}
    cluster = Cluster.from_json(content)
    assert cluster.holder.slowdown == 1.0
    assert cluster.links == {}


@given(planning_examples.clusters())
def test_json_round_trip(cluster: Cluster) -> None:
    assert Cluster.from_json(json.loads(json.dumps(cluster.to_json()))) == cluster


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (changed(devices=[]), "no device at all"),
        (changed(devices=[device(holder=False)]), 'exactly one device must have "holder": true'),
        (changed(devices=[device(), device(name="b")]), "found 2 ['a', 'b']"),
        (changed(devices=[device(), device()]), 'the name "a" is given twice'),
        (
            changed(devices=[device(memory_bytes=-1)]),
            "devices[0].memory_bytes: expected at least 0",
        ),
        (
            changed(devices=[device(slowdown=0)]),
            "devices[0].slowdown: expected at least 1e-09",
        ),
        (changed(devices=[device(slow_down=2)]), 'devices[0]: unknown field "slow_down"'),
        (changed(devices=[device(holder=1)]), "devices[0].holder: expected true or false"),
        (changed(devices=[device(times={})]), "devices[0].times: expected times by batch size"),
        (
            changed(default_link={"bytes_per_s": 1}),
            'default_link: the field "latency_s" is missing',
        ),
        (changed(default_link=LINK | {"bytes_per_s": 0}), "default_link.bytes_per_s: expected"),
        (changed(links=[{"from": "laptop", "to": "tv", **LINK}]), '"tv" is not among the devices'),
        (changed(links=[{"from": "pi", "to": "pi", **LINK}]), 'a link from "pi" to itself'),
        (changed(links=CONTENT["links"] * 2), 'links: the link from "laptop" to "pi" is given'),
    ],
)
def test_wrong_clusters_are_refused_by_name(content: object, message: str) -> None:
    with pytest.raises(OptionError) as caught:
        Cluster.from_json(content)
    assert message in str(caught.value)


def test_without_a_default_every_direction_must_be_listed() -> None:
    content = changed()
    del content["default_link"]
    with pytest.raises(OptionError, match='links does not list "pi" to "laptop"'):
        Cluster.from_json(content)
    content["links"].append({"from": "pi", "to": "laptop", **LINK})
    assert Cluster.from_json(content).link("pi", "laptop") == ClusterLink(1.0, 0.0)


def test_an_unknown_device_is_named() -> None:
    with pytest.raises(OptionError, match=r'no device "tv".*laptop, pi'):
        Cluster.from_json(CONTENT).device("tv")
