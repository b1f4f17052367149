"""A Node inside an app: real meshes on loopback, found by a fake, real training."""

from __future__ import annotations

import ast
import asyncio
import re
import socket
import sys
import types
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch

import p2ptrain
from p2ptrain import events
from p2ptrain.api.views import MemberStatus
from p2ptrain.control.lease import LeasedIdentity, Lender
from p2ptrain.control.member_lock import FolderBusy, FolderLock
from p2ptrain.control.server import ControlServer
from p2ptrain.devices.check import CheckReport
from p2ptrain.devices.probes import Accelerator, FamilyProbe
from p2ptrain.devices.selection import DeviceChooser
from p2ptrain.errors import DeviceUnusable, OptionError, PlanError, RunCancelled, ScriptError
from p2ptrain.events import Done, Event, Plan, Ready, Step
from p2ptrain.mesh.identity.state_folder import STATE_DIR_VARIABLE
from p2ptrain.mesh.interface import MemberState, MeshMember
from p2ptrain.mesh.network_mesh import NetworkMesh
from p2ptrain.mesh.trust.pairing_window import PairingWindow
from tests.support.mesh_household import CODE, FakeDiscovery, FakeNetwork
from tests.support.twin_device import TwinDevice


class Start(Protocol):
    def __call__(self, name: str, memory_bytes: int = ...) -> Awaitable[p2ptrain.Node]: ...


def make_job(epochs: int = 2, **changes: Any) -> p2ptrain.Job:
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "data": [(torch.randn(6), torch.randint(3, ())) for _ in range(32)],
        "model": torch.nn.Sequential(
            torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8), torch.nn.Linear(8, 3)
        ),
        "loss": torch.nn.functional.cross_entropy,
        "optimizer": p2ptrain.SGD(lr=0.1),
        "batch_size": 16,
        "micro_batch": 8,
        **changes,
    }
    return p2ptrain.Job(epochs=epochs, **settings)


def over(devices: int, planner: str = "pp") -> p2ptrain.TrainOptions:
    return p2ptrain.TrainOptions(wait_for=devices, planner=planner)


@pytest.fixture
async def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    """Starts nodes that hear of each other at once; they leave in the end."""
    network = FakeNetwork()
    monkeypatch.setattr("p2ptrain.api.node.started_box", lambda _preload: None)  # loads for seconds
    monkeypatch.setattr(
        "p2ptrain.api.node.NetworkMesh",
        lambda config, emit: NetworkMesh(config, emit, FakeDiscovery(network)),
    )
    async with AsyncExitStack() as stack:

        async def start_one(name: str, memory_bytes: int = 1 << 30) -> p2ptrain.Node:
            node = p2ptrain.Node(
                name=name,
                code=CODE,
                interfaces=("127.0.0.1",),
                port=0,
                state_dir=tmp_path / name,
                memory_bytes=memory_bytes,
            )
            return await stack.enter_async_context(node)

        yield start_one


async def events_until(run: p2ptrain.Run, kind: type[Event]) -> list[Event]:
    """The run's events up to the first of `kind`."""
    seen = []
    async for event in run:
        seen.append(event)
        if isinstance(event, kind):
            break
    return seen


async def test_a_run_tells_what_happens_and_gives_the_users_own_model(start: Start) -> None:
    node, other = await start("desk"), await start("shelf")
    job = make_job()
    before = [tensor.clone() for tensor in job.model.state_dict().values()]
    run = await node.train(job, over(2))
    events = [event async for event in run]
    assert await run.result() is job.model
    assert run.done
    assert [event.step for event in events if isinstance(event, Step)] == [1, 2, 3, 4]
    plan = next(event for event in events if isinstance(event, Plan))
    assert {device.name for stage in plan.stages for device in stage.devices} == {"desk", "shelf"}
    assert isinstance(events[-1], Done)
    after = job.model.state_dict().values()
    assert not any(torch.equal(b, a) for b, a in zip(before, after, strict=True))
    assert {member["name"] for member in other.status()["members"]} == {"desk", "shelf"}


def test_what_a_device_says_of_itself_does_not_change_who_it_is() -> None:
    info = {"name": "desk", "id": "b" * 64, "state": "left", "room": "cellar"}
    line = MemberStatus.of(MeshMember("a" * 64, "shelf", MemberState.ALIVE, info), {})
    assert (line.name, line.state) == ("shelf", "alive")
    assert line.to_json() == {"name": "shelf", "id": "a" * 64, "state": "alive", "room": "cellar"}


async def test_options_are_keywords_and_events_can_be_read_again(start: Start) -> None:
    node, _ = await start("desk"), await start("shelf")
    run = await node.train(make_job(), wait_for=2, planner="pp", mode="sync", steps=3)
    seen = [event async for event in run.events()]
    assert [event.step for event in seen if isinstance(event, p2ptrain.events.Step)] == [1, 2, 3]
    assert [event async for event in run] == seen
    assert [event async for event in run.events()] == seen  # of a run that has ended too
    with pytest.raises(TypeError, match="waits_for"):
        await node.train(make_job(), waits_for=2)
    with pytest.raises(OptionError, match="wait_for beside options"):
        await node.train(make_job(), over(2), wait_for=2)


async def test_what_a_node_says_is_typed_and_the_json_of_the_commands(start: Start) -> None:
    desk, shelf = await start("desk"), await start("shelf")
    await (await desk.train(make_job(), over(2))).result()  # they have found each other then
    status = desk.status()
    members = {member.name: member for member in status.members}
    assert members.keys() == {"desk", "shelf"}
    assert (members["shelf"].state, members["shelf"].memory_bytes) == ("alive", 1 << 30)
    assert members["shelf"].traffic is not None
    assert status.coordinator is not None
    assert status.coordinator.name in members
    assert (status.cut_off, status.job) == ((), None)
    assert status["members"] == [member.to_json() for member in status.members]
    assert dict(status) == status.to_json()
    (device,) = desk.devices()
    assert (device.name, device.connected, device.cut_off) == ("shelf", True, None)
    (link,) = await desk.links()
    assert link.name == "shelf"
    assert link.error is None
    assert link.bytes_per_s is not None
    assert link.bytes_per_s > 0
    assert "error" not in link
    run = await shelf.train(make_job(epochs=500), over(2))
    while desk.status().job is None:
        await events_until(run, Step)
    job = desk.status().job
    assert job is not None
    assert job.holder == "shelf"
    await run.cancel()


async def test_cancelling_a_run_is_not_being_cancelled(start: Start) -> None:
    node, _ = await start("desk"), await start("shelf")
    run = await node.train(make_job(epochs=500), over(2))
    await events_until(run, Step)
    waiting = asyncio.create_task(run.result())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not run.done  # who waited is gone, and the job continues
    await run.cancel()
    with pytest.raises(RunCancelled):
        await run.result()
    with pytest.raises(RunCancelled):
        [event async for event in run.events()]


async def test_one_job_after_the_other_but_not_two_at_once(start: Start) -> None:
    node, _ = await start("desk"), await start("shelf")
    first = await node.train(make_job(epochs=500), over(2))
    await events_until(first, Step)
    with pytest.raises(OptionError, match="already trains a job"):
        await node.train(make_job())
    await first.cancel()
    with pytest.raises(RunCancelled):
        await first.result()
    for _again in range(2):
        await (await node.train(make_job(), over(2))).result()


async def test_devices_at_work_for_others_are_left_out_with_the_reason(start: Start) -> None:
    desk, shelf = await start("desk"), await start("shelf")
    first = await desk.train(make_job(epochs=5000), over(2))
    await events_until(first, Step)
    attic = await start("attic")
    second = await attic.train(make_job(), over(3))
    plans = [event async for event in second if isinstance(event, Plan)]
    reasons = {out.name: out.reason for out in plans[0].left_out}
    assert reasons.keys() == {"desk", "shelf"}
    assert all("already computes for another training" in reason for reason in reasons.values())
    assert shelf.status()["job"] is not None
    assert not first.done
    await first.cancel()


async def test_where_no_plan_fits_people_hear_who_was_left_out_and_why(start: Start) -> None:
    desk, _ = await start("desk"), await start("shelf")
    first = await desk.train(make_job(epochs=5000), over(2))
    await events_until(first, Step)
    attic = await start("attic", memory_bytes=1 << 20)
    with pytest.raises(PlanError, match="missing") as caught:
        await (await attic.train(make_job(), over(3))).result()
    said = str(caught.value)
    assert "Not used: " in said
    assert all(
        f"{name} already computes for another training" in said for name in ("desk", "shelf")
    )
    await first.cancel()


async def test_a_device_that_works_for_another_job_cannot_hold_one(start: Start) -> None:
    desk, shelf = await start("desk"), await start("shelf")
    first = await desk.train(make_job(epochs=5000), over(2))
    await events_until(first, Step)
    with pytest.raises(OptionError, match="this device is computing for desk's training"):
        await (await shelf.train(make_job())).result()
    await first.cancel()


async def test_leaving_ends_the_run(start: Start) -> None:
    node, other = await start("desk"), await start("shelf")
    run = await node.train(make_job(epochs=5000), over(2))
    await events_until(run, Step)
    left = asyncio.create_task(_until_left(other, "desk"))
    await asyncio.sleep(0)
    await node.leave()
    assert run.done
    await left
    await (await other.train(make_job(), over(1, "single"))).result()


async def _until_left(node: p2ptrain.Node, name: str) -> None:
    async for event in node.events():
        if isinstance(event, events.Member) and (event.name, str(event.state)) == (name, "left"):
            return


async def test_what_ends_a_job_is_raised_by_the_iteration_and_the_result(start: Start) -> None:
    def fails(output: object, target: object) -> float:
        raise ValueError("mine")

    job = make_job()
    job = make_job(eval_data=job.data, metrics={"m": fails})
    run = await (await start("desk")).train(job)
    with pytest.raises(ScriptError, match="the metric 'm' failed: ValueError: mine"):
        [event async for event in run]
    with pytest.raises(ScriptError, match="mine"):
        await run.result()


async def test_a_node_outside_its_context_trains_nothing(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="not joined"):
        await p2ptrain.Node(state_dir=tmp_path).train(make_job())


async def _events(run: p2ptrain.Run) -> list[Event]:
    async with asyncio.timeout(10):
        return [event async for event in run]


async def test_a_node_outside_its_context_speaks_of_its_last_job(tmp_path: Path) -> None:
    node = p2ptrain.Node(state_dir=tmp_path)
    with pytest.raises(p2ptrain.UserError, match="has held no training before"):
        await node.explain()
    assert await node.rounds() is None


async def test_a_run_that_is_cancelled_before_it_began_has_an_end(start: Start) -> None:
    run = await (await start("desk")).train(make_job())
    await run.cancel()
    with pytest.raises(RunCancelled):
        await _events(run)


async def test_who_waits_with_a_timeout_misses_no_event(start: Start) -> None:
    run = await (await start("desk")).train(make_job(), over(1, "single"))
    seen: list[Event] = []
    timeouts = 0
    while not seen or not isinstance(seen[-1], Done):
        try:
            async with asyncio.timeout(0.001 if not timeouts else 10):
                seen.append(await anext(run))
        except TimeoutError:
            timeouts += 1
    assert timeouts == 1
    assert [event.step for event in seen if isinstance(event, Step)] == [1, 2, 3, 4]


async def test_cancelling_twice_lets_the_others_go_all_the_same(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    letting_go, go_on = asyncio.Event(), asyncio.Event()

    async def end(*_: object) -> None:
        letting_go.set()
        await go_on.wait()

    monkeypatch.setattr("p2ptrain.holder.trainer.job_registry.end_job", end)
    node = await start("desk")
    run = await node.train(make_job(epochs=500), over(1, "single"))
    await events_until(run, Step)
    first = asyncio.create_task(run.cancel())
    await letting_go.wait()
    second = asyncio.create_task(run.cancel())
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.gather(first, second)
    await (await node.train(make_job(), over(1, "single"))).result()


async def test_events_of_a_node_count_from_the_call_on_until_it_leaves(start: Start) -> None:
    node = await start("desk")
    events = node.events()
    await (await node.train(make_job(), over(1, "single"))).result()
    await node.leave()
    async with asyncio.timeout(10):
        seen = [event async for event in events]
        assert [event async for event in node.events()] == []
    assert [event.step for event in seen if isinstance(event, Step)] == [1, 2, 3, 4]


async def test_nothing_is_left_of_a_node_that_cannot_begin(tmp_path: Path) -> None:
    """Its own jobs have no place; by then it is a member."""
    (tmp_path / "job").write_text("in the way")
    tasks = asyncio.all_tasks()
    node = p2ptrain.Node(state_dir=tmp_path, interfaces=("127.0.0.1",), port=0)
    with pytest.raises(p2ptrain.UserError, match="cannot be used"):
        await node.__aenter__()
    assert asyncio.all_tasks() == tasks


async def test_another_devices_job_that_ends_early_hides_none_that_runs(start: Start) -> None:
    desk, shelf = await start("desk"), await start("shelf")
    first = await desk.train(make_job(epochs=5000), over(2))
    async for _ in first:
        if shelf.status()["job"] is not None:
            break
    with pytest.raises(OptionError):
        await (await shelf.train(make_job())).result()
    job = shelf.status()["job"]
    assert job is not None
    assert job["holder"] == "desk"
    await first.cancel()


async def test_the_page_for_apps_runs_as_it_stands(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await start("desk")
    monkeypatch.setenv(STATE_DIR_VARIABLE, str(tmp_path / "app"))
    page = (Path(__file__).parents[2] / "docs" / "user" / "embed.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.M)
    names: dict[str, Any] = {"job": make_job(), "p2ptrain": p2ptrain}
    for block in blocks:
        code = compile(block, "embed.md", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        running = types.FunctionType(code, names)()
        if running is not None:
            await running
        assert names.pop("model") is names["job"].model
    assert len(blocks) == 2


async def test_an_apps_own_error_leaves_the_context_as_it_is(start: Start, tmp_path: Path) -> None:
    """Not in an ExceptionGroup, which no `except TimeoutError` would catch."""
    await start("other")
    node = p2ptrain.Node(
        name="app", code=CODE, interfaces=("127.0.0.1",), port=0, state_dir=tmp_path / "app"
    )
    with pytest.raises(TimeoutError):
        async with node:
            raise TimeoutError


async def test_what_a_node_is_asked_outside_its_context_is_refused_in_words(tmp_path: Path) -> None:
    node = p2ptrain.Node(state_dir=str(tmp_path), interfaces="127.0.0.1", port=0)
    for ask in (node.status, node.devices, node.invite, lambda: node.window):
        with pytest.raises(OptionError, match="not joined"):
            ask()
    async with node:
        assert node.status()["address"] == "127.0.0.1"
    with pytest.raises(OptionError, match="a node can join only once"):
        await node.__aenter__()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"port": 70000}, "port must be"),
        ({"threads": 0}, "threads"),
        ({"threads": 2**31}, "threads"),
        ({"memory_bytes": 0}, "mem"),
        ({"memory_bytes": "2GiB"}, "memory_bytes must be a whole number, not '2GiB'"),
        ({"threads": 1.5}, "threads must be a whole number, not 1.5"),
        ({"port": "4000"}, "port must be a whole number, not '4000'"),
        ({"name": 7}, "name must be a text, not 7"),
    ],
)
def test_limits_of_a_node_are_looked_at(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        p2ptrain.Node(state_dir=tmp_path, **options)


async def test_what_is_no_job_and_no_options_is_refused_at_once(tmp_path: Path) -> None:
    node: Any = p2ptrain.Node(state_dir=tmp_path)
    train: Any = p2ptrain.train
    no_options = {"planner": "pp"}
    for refused in (node.train("script.py"), node.train(make_job(), no_options)):
        with pytest.raises(OptionError, match=r"must be (a )?p2ptrain\.(Job|TrainOptions), not"):
            await refused
    with pytest.raises(OptionError, match=r"must be a p2ptrain\.Job, not type"):
        train(p2ptrain.Job)
    with pytest.raises(OptionError, match=r"must be p2ptrain\.TrainOptions, not dict"):
        train(make_job(), options=no_options)


def test_names_that_are_loaded_when_used_are_listed() -> None:
    assert set(p2ptrain.__all__) <= set(dir(p2ptrain))


async def test_what_an_apps_function_raises_of_the_household_leaves_it_whole(
    tmp_path: Path,
) -> None:
    heard: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: heard.append(context))

    def fails(event: Event) -> None:
        raise RuntimeError(f"the window of {event.event} is closed")

    node = p2ptrain.Node(state_dir=tmp_path, interfaces=("127.0.0.1",), port=0, on_event=fails)
    async with node:
        coordinator = node.status()["coordinator"]
    assert coordinator["name"] == node.status()["name"]
    assert "the window of ready is closed" in [str(context["exception"]) for context in heard]


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a local run has no business on the network")

    monkeypatch.setattr("p2ptrain.api.node.NetworkMesh", refuse)


def local_losses(job: p2ptrain.Job) -> list[float]:
    events: list[Event] = []
    options = p2ptrain.TrainOptions(local=True)
    assert p2ptrain.train(job, options=options, on_event=events.append) is job.model
    assert not any(isinstance(event, Ready) for event in events)
    return [event.loss for event in events if isinstance(event, Step)]


async def test_a_node_computes_on_the_accelerator_that_was_chosen(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    twin = TwinDevice()
    card = FamilyProbe((Accelerator("cuda:0", twin.title, 1 << 33),))
    monkeypatch.setattr(
        "p2ptrain.api.device_services.DeviceChooser",
        lambda check: DeviceChooser(
            lambda device, software: CheckReport(), {"cuda": lambda: card}, lambda name: twin
        ),
    )
    node = await start("a")
    (member,) = node.status().members
    assert member.device == twin.title
    run = await node.train(make_job(), over(1))
    losses = [event.loss async for event in run if isinstance(event, Step)]
    assert len(losses) == 4
    assert twin.call_names


def test_an_accelerator_that_is_not_here_ends_it_before_anything_begins(tmp_path: Path) -> None:
    absent = "mps" if sys.platform != "darwin" else "xpu"
    for local in (True, False):
        with pytest.raises(DeviceUnusable, match=f"device {absent}: this torch"):
            p2ptrain.train(make_job(), device=absent, local=local, state_dir=tmp_path)
    with pytest.raises(OptionError, match="'tpu' is no device"):
        p2ptrain.train(make_job(), device="tpu", local=True)


@pytest.mark.usefixtures("no_network")
def test_a_local_run_needs_no_network() -> None:
    assert len(local_losses(make_job())) == 4


@pytest.mark.usefixtures("no_network")
async def test_train_works_inside_a_running_loop_as_in_a_notebook() -> None:
    assert local_losses(make_job()) == local_losses(make_job())


@pytest.mark.usefixtures("no_network")
def test_options_that_no_node_takes_are_refused_where_none_is_needed() -> None:
    local = p2ptrain.TrainOptions(local=True)
    with pytest.raises(TypeError, match="stat_dir"):
        p2ptrain.train(make_job(), options=local, stat_dir="here")
    with pytest.raises(OptionError, match="threads must be"):
        p2ptrain.train(make_job(), options=local, threads=0)


@pytest.mark.usefixtures("no_network")
def test_a_local_run_raises_what_went_wrong() -> None:
    def schedule(update: int) -> float:
        raise KeyError(update)

    with pytest.raises(ScriptError, match=r"schedule\(0\) failed: KeyError: 0"):
        local_losses(make_job(schedule=schedule))


async def test_an_app_has_the_place_of_a_join_that_steps_aside(tmp_path: Path) -> None:
    """The name, the port and the pairing window are the member's, and come back."""
    lender = Lender()
    place = LeasedIdentity(
        "desk", _free_port(), PairingWindow.opened(CODE, asyncio.get_running_loop().time())
    )

    async def step_aside(lock: FolderLock) -> None:
        await lender.wanted.wait()
        await lender.lend(place, lock, asyncio.Event())

    with FolderLock(tmp_path, "join") as lock:
        async with ControlServer(tmp_path, lender):
            lending = asyncio.create_task(step_aside(lock))
            async with p2ptrain.Node(state_dir=tmp_path, interfaces=("127.0.0.1",)) as node:
                status = node.status()
                assert (status["name"], status["port"]) == (place.name, place.port)
                assert node.window is not None
                assert not lending.done()
            await asyncio.wait_for(lending, 5)
    assert lender.window is not None


async def test_of_two_nodes_with_one_folder_the_second_says_why_not(tmp_path: Path) -> None:
    options: dict[str, Any] = {"state_dir": tmp_path, "interfaces": ("127.0.0.1",), "port": 0}
    async with p2ptrain.Node(**options):
        second = p2ptrain.Node(**options)
        with pytest.raises(FolderBusy, match=r"p2ptrain app \(process \d+\) already runs"):
            await second.__aenter__()
    async with p2ptrain.Node(**options) as third:
        assert third.status()["members"]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
