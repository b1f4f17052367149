"""Where each setting cuts the model and how long an epoch takes it: simulated, the same anywhere.

Three equal small devices on 1 Gbit/s by the plain cost model; profile.json beside this file is what
`p2ptrain profile tools/async_learning/mnist.py --batch-sizes 4,16,64` measured once. Plans are
those of planner `pp`. An epoch begins and ends with an empty pipeline, as evaluations make it;
these themselves take no time.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from p2ptrain.cli.files import read_profile
from p2ptrain.plan.cluster import Cluster, Device, Link
from p2ptrain.plan.cost import CostModel
from p2ptrain.plan.plan import Plan
from p2ptrain.plan.planners import make_plan
from p2ptrain.plan.profile import Profile
from p2ptrain.plan.request import Mode, PlanRequest
from p2ptrain.plan.simulation.lanes import build_engine
from p2ptrain.plan.simulation.simulate import draft_of, round_seconds
from p2ptrain.plan.simulation.steady import endless
from p2ptrain.plan.versions import Weights
from tools.async_learning.settings import BATCH, Setting

NAMES = "abc"
MEMORY_BYTES = 2 << 30
SLOWDOWN = 8.0
"""Times as slow as the profile's core: about what a small board's is."""
LINK = Link(125e6, 0.001)


@dataclass(frozen=True)
class Timed:
    """A setting's plan and what it costs; `per_step`: seconds of an update in steady running."""

    plan: Plan
    epoch_seconds: float
    per_step: float


def profile() -> Profile:
    """Of the model that all settings train."""
    path = Path(__file__).with_name("profile.json")
    return read_profile(path)


def cluster(stages: int) -> Cluster:
    """So many equal devices; the first holds the data."""
    devices = tuple(
        Device(name, MEMORY_BYTES, SLOWDOWN, holder=name == NAMES[0]) for name in NAMES[:stages]
    )
    return Cluster(devices, LINK)


def timed(setting: Setting, updates: int) -> Timed:
    """The plan of a setting, and an epoch of so many updates."""
    how, size = setting.how, setting.micro_batch or BATCH
    request = PlanRequest(
        batch_size=BATCH if how is None else size,
        micro_batch=size,
        planner="pp" if setting.stages > 1 else "single",
        groups=False,
        mode=Mode.SYNC if how is None else Mode.ASYNC,
        weights=Weights.STASHED if how is None else how.weights,
    )
    household = cluster(setting.stages)
    plan = make_plan(profile(), household, request)
    cost = CostModel(profile(), household)  # an epoch is a round of its own
    draft = draft_of(plan, cost)
    if how is None:
        seconds = round_seconds(cost, draft)
        return Timed(plan, updates * seconds, seconds)
    pieces = BATCH // size
    epoch = build_engine(cost, endless(draft, updates * pieces)).run()
    return Timed(plan, epoch, plan.predicted.round_seconds * pieces)
