"""Real meshes over loopback TLS in one process: what people and the rooms above rely on."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from p2ptrain import events
from p2ptrain.errors import LinkClosed, NotPaired, OptionError, PeerError, UserError
from p2ptrain.events import (
    Coordinator,
    Member,
    Pairing,
    PairingClosed,
    PairingFailed,
    Ready,
    Renamed,
)
from p2ptrain.mesh.identity.device_record import DEVICE_FILE
from p2ptrain.mesh.identity.identity import IDENTITY_FILE, load_or_create
from p2ptrain.mesh.identity.state_folder import StateFolder
from p2ptrain.mesh.interface import LinkLost, LinkUp, MemberChanged, MemberState, MeshEvent
from p2ptrain.mesh.links.hello import Hello, to_message
from p2ptrain.mesh.membership.core_messages import ElectionKind, ElectionMessage, encode
from p2ptrain.mesh.membership_driver import ELECTION_KIND, MEMBERSHIP_KIND
from p2ptrain.mesh.trust.pairing_window import PairingWindow
from p2ptrain.net.frame import Header
from p2ptrain.net.link.link import Link, LinkReceiver
from p2ptrain.net.message import Message, Priority
from p2ptrain.net.transport.dial import dial, dial_unpaired
from p2ptrain.net.transport.listener import Listener, ListenerHooks
from p2ptrain.net.transport.pairing_channel import PairingChannel
from p2ptrain.net.transport.tls import client_context, server_context
from tests.support.links import Inbox
from tests.support.mesh_household import CODE, Device, Household, household


@pytest.fixture
async def home(tmp_path: Path) -> AsyncIterator[Household]:
    async with household(tmp_path) as started:
        yield started


async def dialled(device: Device, folder: Path, name: str, receiver: LinkReceiver) -> Link:
    """A link to `device` with the identity in `folder`/`name`, past the one that has it."""
    me = load_or_create(StateFolder(folder / name))
    certificate = load_or_create(StateFolder(folder / device.mesh.name)).certificate_der
    context = client_context(me.pem_file, [certificate])
    where = [("127.0.0.1", device.mesh.port)]
    return await dial(where, context, device.mesh.self_id, lambda peer: Link(peer, receiver))


async def together(*devices: Device) -> None:
    """Wait until all see all alive, and agree who coordinates."""
    names = {device.mesh.name for device in devices}
    for device in devices:
        await device.until(lambda device=device: device.alive() == names)
    for device in devices:
        await device.until(lambda: len({_coordinator(d) for d in devices} - {None}) == 1)
        await device.until(lambda device=device: _coordinator(device) is not None)


def _coordinator(device: Device) -> str | None:
    coordinator = device.mesh.coordinator
    return coordinator.id if coordinator is not None else None


async def test_two_devices_with_one_code_find_pair_and_agree(home: Household) -> None:
    anna, bert = await home.start("anna"), await home.start("bert")
    await together(anna, bert)
    kinds = [type(event) for event in anna.events]
    assert kinds.index(Ready) < kinds.index(Pairing) < kinds.index(Member)
    assert Member("bert", "alive") in anna.events
    assert anna.shown(Coordinator)
    assert anna.shown(Pairing) == [Pairing(CODE)]
    ready = anna.shown(Ready)[0]
    assert (ready.address, ready.port) == ("127.0.0.1", anna.mesh.port)


async def test_messages_with_parts_travel_both_ways(home: Household) -> None:
    anna, bert = await home.start("anna"), await home.start("bert")
    await together(anna, bert)
    landed, reply_landed = bytearray(100_000), bytearray(100_000)

    async def echo(_peer: str, message: Message) -> Message:
        return Message("echoed", {}, message.parts)

    bert.mesh.route("echo", echo, lambda _p, _f, _sizes: [memoryview(landed)])
    sent = bytes(range(250)) * 400
    reply = await anna.mesh.call(
        bert.mesh.self_id,
        Message("echo", {}, (memoryview(sent),)),
        timeout_seconds=5,
        priority=Priority.TENSOR,
        reply_parts=lambda _p, _f, _sizes: [memoryview(reply_landed)],
    )
    assert reply.kind == "echoed"
    assert bytes(landed) == bytes(reply_landed) == sent
    statistics = anna.mesh.link_statistics(bert.mesh.self_id)
    assert statistics is not None
    assert statistics.sent_parts_bytes >= 100_000
    speed = await anna.mesh.measure_link(bert.mesh.self_id, 0.02)
    assert speed.bytes_per_s > 1e5


async def test_links_are_reported_when_they_end_and_when_they_are_back(home: Household) -> None:
    anna, bert = await home.start("anna"), await home.start("bert")
    await together(anna, bert)
    peer = bert.mesh.self_id
    assert anna.mesh.connected == {peer}
    heard: list[MeshEvent] = []
    anna.mesh.subscribe(heard.append)
    bert.mesh.connections.cut(anna.mesh.self_id, "pulled")
    await anna.until(lambda: LinkUp(peer) in heard)
    links = [event for event in heard if isinstance(event, LinkLost | LinkUp)]
    assert [type(event) for event in links] == [LinkLost, LinkUp]
    assert anna.mesh.connected == {peer}


async def test_a_full_disk_costs_neither_links_nor_names(
    home: Household, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    anna = await home.start("anna")
    async with home.running("bert") as bert:
        await together(anna, bert)
        _fill_disk(monkeypatch, tmp_path / "anna", "addresses", "trusted")
        heard: list[MeshEvent] = []
        anna.mesh.subscribe(heard.append)
        bert.mesh.connections.cut(anna.mesh.self_id, "pulled")
        await anna.until(lambda: LinkUp(bert.mesh.self_id) in heard)
    again = await home.start("bert", name="berta", code=None)
    await together(anna, again)
    assert [device.name for device in anna.mesh.household_trust.devices()] == ["berta"]
    await anna.until(lambda: "trusted.json cannot" in str(anna.shown(events.Warning)))
    monkeypatch.undo()


def _fill_disk(monkeypatch: pytest.MonkeyPatch, folder: Path, *names: str) -> None:
    """Nothing can be written in `folder` any more, or no file of such a name."""
    write = StateFolder.write

    def full(place: StateFolder, name: str, content: bytes) -> None:
        if place.path == folder and name.startswith(names or ("",)):
            raise UserError(f"{folder / name} cannot be written: the disk is full")
        write(place, name, content)

    monkeypatch.setattr(StateFolder, "write", full)


def _tell_of_writes(monkeypatch: pytest.MonkeyPatch, home: Household) -> None:
    """Who waits for a file looks again when one has been written."""
    write = StateFolder.write

    def noted(place: StateFolder, name: str, content: bytes) -> None:
        write(place, name, content)
        home.pulse.beat()

    monkeypatch.setattr(StateFolder, "write", noted)


async def test_a_full_disk_ends_no_membership_at_an_election(
    home: Household, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its term is written as soon as there is room again."""
    anna, bert = await home.start("anna"), await home.start("bert")
    await together(anna, bert)
    _fill_disk(monkeypatch, tmp_path / "anna")
    seen = anna.mesh.membership_driver.election.term + 5
    said = ElectionMessage(ElectionKind.ANNOUNCE, seen, support=2)
    message = Message(ELECTION_KIND, {"payload": encode(said)})
    await bert.mesh.send(anna.mesh.self_id, message)
    await anna.until(lambda: "device.json cannot be written" in str(anna.shown(events.Warning)))
    assert anna.mesh.membership_driver.election.term >= seen
    await together(anna, bert)
    monkeypatch.undo()
    _tell_of_writes(monkeypatch, home)
    await bert.mesh.send(anna.mesh.self_id, message)
    folder = StateFolder(tmp_path / "anna")
    await anna.until(lambda: folder.read_json(DEVICE_FILE)["term"] >= seen)


async def test_a_full_disk_keeps_no_removed_device_in(
    home: Household, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    anna, bert = await home.start("anna"), await home.start("bert")
    await together(anna, bert)
    carl = await home.start("carl")
    await together(anna, bert, carl)
    _fill_disk(monkeypatch, tmp_path / "anna")
    bert.mesh.household_trust.remove("carl")
    await anna.until(lambda: anna.mesh.connected == {bert.mesh.self_id})
    await anna.until(lambda: Member("carl", "dead") in anna.events)
    await anna.until(lambda: "carl was removed" in str(anna.shown(events.Warning)))


async def test_a_good_bye_is_an_end_for_certain(home: Household) -> None:
    heard: list[MeshEvent] = []
    async with home.running("bert") as bert:
        anna = await home.start("anna")
        await together(anna, bert)
        anna.mesh.subscribe(heard.append)
    await anna.until(lambda: Member("bert", "left") in anna.events)
    gone = [event for event in heard if isinstance(event, MemberChanged)]
    assert [(event.member.state, event.certain) for event in gone] == [(MemberState.LEFT, True)]


async def test_parts_that_no_handler_expects_do_not_end_the_link(home: Household) -> None:
    anna, bert = await home.start("anna"), await home.start("bert")
    await together(anna, bert)
    late = Message("gone.job", {}, (memoryview(bytes(200_000)),))
    await anna.mesh.send(bert.mesh.self_id, late, Priority.TENSOR)
    speed = await anna.mesh.measure_link(bert.mesh.self_id, 0.01)
    assert speed.bytes_per_s > 0
    assert bert.mesh.router.refused["gone.job"] == 1


async def test_a_device_paired_with_one_is_introduced_to_all(home: Household) -> None:
    anna = await home.start("anna")
    bert = await home.start("bert")
    await together(anna, bert)
    async with home.running("cora", code="87654321") as cora:
        await cora.until(lambda: bool(cora.shown(PairingFailed)))
    assert {d.name for d in anna.mesh.household_trust.devices()} == {"bert"}
    dora = await home.start("dora")
    await together(anna, bert, dora)
    assert {d.name for d in dora.mesh.household_trust.devices()} == {"anna", "bert"}


async def test_a_member_knows_devices_it_never_paired_with(home: Household, tmp_path: Path) -> None:
    """Without discovery: only the introduction and the addresses beside it lead there."""
    anna = await home.start("anna")
    bert = await home.start("bert")
    await together(anna, bert)
    where = f"127.0.0.1:{anna.mesh.port}"
    anna.mesh.household_trust.invite()
    home.network = type(home.network)()
    cora = await home.start("cora", peers=(where,))
    await together(anna, bert, cora)
    by = {d.name: d.introduced_by for d in cora.mesh.household_trust.devices()}
    assert by == {"anna": "cora", "bert": "anna"}


async def test_a_hello_tells_the_addresses_of_that_moment(
    home: Household, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others keep them, and take a device for ended that nobody hears where it was before."""
    anna = await home.start("anna", interfaces=())
    found = {
        name: [SimpleNamespace(family=socket.AF_INET, address=ip)]
        for name, ip in (("lo", "127.0.0.1"), ("wlan0", "10.1.0.88"))
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)
    bert = await home.start("bert")
    await together(anna, bert)
    hello = bert.mesh.connections.hello_of(anna.mesh.self_id)
    assert hello is not None
    assert hello.addresses == ("10.1.0.88",)


async def test_a_peer_whose_name_is_not_known_yet_ends_no_start(
    home: Household, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nobody(*_peer: object, **_options: object) -> list[object]:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", nobody)
    anna = await home.start("anna", peers=("nas.home",))
    bert = await home.start("bert")
    await together(anna, bert)
    await anna.until(lambda: "--peer nas.home: no such host now" in str(anna.shown(events.Warning)))


async def test_a_restart_needs_no_code(home: Household) -> None:
    anna = await home.start("anna")
    async with home.running("bert") as bert:
        await together(anna, bert)
        first_id = bert.mesh.self_id
    await anna.until(lambda: anna.mesh.members[first_id].state is MemberState.LEFT)
    again = await home.start("bert", code=None)
    await together(anna, again)
    assert again.mesh.self_id == first_id
    assert not again.shown(Pairing)


async def test_another_identity_is_never_taken_without_a_word(
    home: Household, tmp_path: Path
) -> None:
    anna = await home.start("anna")
    async with home.running("bert") as bert:
        await together(anna, bert)
        assert not any("a new identity" in str(told) for told in bert.shown(events.Warning))
    (tmp_path / "bert" / IDENTITY_FILE).unlink()
    async with home.running("bert", code=None) as again:
        await again.until(lambda: "a new identity" in str(again.shown(events.Warning)))


async def test_the_later_of_two_names_gets_a_number(home: Household, tmp_path: Path) -> None:
    anna, bert = await home.start("anna"), await home.start("bert")
    await together(anna, bert)  # so that some time has passed
    other = await home.start("other", name="anna")
    await other.until(lambda: other.mesh.name == "anna-2")
    await together(anna, bert, other)
    assert other.shown(Renamed) == [Renamed("anna-2", "anna")]
    assert not anna.shown(Renamed)
    assert (tmp_path / "other" / "device.json").read_text().count("anna-2") == 1


async def test_a_removed_device_is_cut_off_everywhere(home: Household) -> None:
    """S4: within a second, by all."""
    anna, bert, cora = [await home.start(name) for name in ("anna", "bert", "cora")]
    await together(anna, bert, cora)
    removed = anna.mesh.household_trust.remove("cora")
    assert removed.name == "cora"
    gone = removed.id
    for device in (anna, bert):
        await device.until(lambda device=device: "cora" not in device.alive(), 1.0)
        assert gone not in {d.id for d in device.mesh.household_trust.devices()}
        with pytest.raises(LinkClosed):
            await device.mesh.call(gone, Message("mesh.ping"), timeout_seconds=1)
    await cora.until(lambda: cora.alive() == {"cora"})


async def test_a_removed_device_comes_back_only_by_an_invitation(home: Household) -> None:
    """It still knows the code with which the household was made, and its window is open."""
    anna = await home.start("anna")
    async with home.running("bert") as bert:
        await together(anna, bert)
        anna.mesh.household_trust.remove("bert")
        await bert.until(lambda: bert.alive() == {"bert"})
    async with home.running("bert") as repeated:
        await repeated.until(lambda: bool(repeated.shown(Pairing)))
        channel, _ = await dial_unpaired([("127.0.0.1", anna.mesh.port)])
        await channel.send(b"hello")
        assert b"closed" in await channel.receive()
        assert not anna.mesh.household_trust.devices()
    code = anna.mesh.household_trust.invite()
    assert code != CODE
    again = await home.start("bert", code=code)
    await together(anna, again)


async def test_a_code_of_a_start_script_lets_no_removed_device_in(home: Household) -> None:
    """Its person makes up another identity, and anna's usual command is run once more."""
    async with home.running("anna") as anna, home.running("bert") as bert:
        cora = await home.start("cora")
        await together(anna, bert, cora)
        cora.mesh.household_trust.remove("bert")
        await anna.until(lambda: {d.name for d in anna.mesh.household_trust.devices()} == {"cora"})
        assert anna.shown(PairingClosed)
    again = await home.start("anna")  # with the same code
    await together(again, cora)
    assert again.mesh.household_trust.window is None
    assert any("may know this code" in str(told) for told in again.shown(events.Warning))
    channel, _ = await dial_unpaired([("127.0.0.1", again.mesh.port)])
    assert b"closed" in await channel.receive()
    new = again.mesh.household_trust.invite()
    assert new != CODE
    await together(again, cora, await home.start("dora", code=new))


async def test_a_code_given_again_to_paired_devices_lets_a_new_one_in(home: Household) -> None:
    """As in the first ten minutes of each start, while nobody was removed."""
    async with home.running("anna") as anna, home.running("bert") as bert:
        await together(anna, bert)
    anna, bert = await home.start("anna"), await home.start("bert")
    await together(anna, bert, await home.start("cora"))


async def test_one_port_is_all_that_a_stranger_finds(home: Household) -> None:
    """S1: what else listens in this process listened before."""
    process = psutil.Process()

    def ports() -> set[int]:
        found = process.net_connections(kind="tcp")
        return {c.laddr.port for c in found if c.status == psutil.CONN_LISTEN}

    before = ports()
    anna = await home.start("anna")
    assert ports() - before == {anna.mesh.port}


async def test_a_relay_between_two_devices_pairs_no_device(home: Household, tmp_path: Path) -> None:
    """S8: it ends TLS on both sides, and knows everything but the code."""
    anna = await home.start("anna")
    mallory = load_or_create(StateFolder(tmp_path / "mallory"))
    passing: set[asyncio.Task[None]] = set()

    async def relay(near: PairingChannel) -> None:
        far, _ = await dial_unpaired([("127.0.0.1", anna.mesh.port)])
        with contextlib.suppress(PeerError):
            while True:
                await far.send(await near.receive())
                await near.send(await far.receive())
        near.abort("it is over")
        far.abort("it is over")

    def greet(channel: PairingChannel) -> None:
        passing.add(asyncio.create_task(relay(channel)))

    context = server_context(mallory.pem_file, [])
    listener = Listener(ListenerHooks(lambda: context, lambda _peer: pytest.fail("a link"), greet))
    await listener.start(["127.0.0.1"])
    home.network = type(home.network)()  # bert finds nobody but the relay
    bert = await home.start("bert", peers=(f"127.0.0.1:{listener.port}",))
    await bert.until(lambda: bool(bert.shown(PairingFailed)))
    await anna.until(lambda: "did not prove its key" in str(anna.shown(events.Warning)))
    assert [device.mesh.household_trust.devices() for device in (anna, bert)] == [[], []]
    assert anna.shown(PairingFailed) == []  # its guess was not even looked at
    await listener.close()
    await asyncio.gather(*passing, return_exceptions=True)


async def test_removing_an_unknown_device_names_the_known(home: Household) -> None:
    anna, bert = await home.start("anna"), await home.start("bert")
    await together(anna, bert)
    with pytest.raises(UserError, match=r"no paired device is called 'cora'.* bert"):
        anna.mesh.household_trust.remove("cora")


async def test_a_wrong_code_is_reported_and_counted_on_both_sides(home: Household) -> None:
    anna = await home.start("anna", code=None)
    right = anna.shown(Pairing)[0].code
    wrong = f"{(int(right) + 1) % 10**8:08d}"
    bert = await home.start("bert", code=wrong)
    await bert.until(lambda: bool(bert.shown(PairingFailed)))
    assert [event.attempts_left for event in bert.shown(PairingFailed)] == [4]
    assert [event.attempts_left for event in anna.shown(PairingFailed)] == [4]
    assert "code is wrong" in bert.shown(PairingFailed)[0].message
    assert not anna.mesh.household_trust.devices()
    assert not bert.mesh.household_trust.devices()


async def test_five_wrong_codes_close_the_window_for_the_right_one(home: Household) -> None:
    anna = await home.start("anna", code=None)
    right = anna.shown(Pairing)[0].code
    for number in range(1, 6):
        wrong = f"{(int(right) + number) % 10**8:08d}"
        async with home.running(f"w{number}", code=wrong) as stranger:
            await stranger.until(lambda s=stranger: bool(s.shown(PairingFailed)))
    assert [event.attempts_left for event in anna.shown(PairingFailed)] == [4, 3, 2, 1, 0]
    late = await home.start("late", code=right)
    channel, _certificate = await dial_unpaired([("127.0.0.1", anna.mesh.port)])
    await channel.send(b"anything")
    assert b"closed" in await channel.receive()
    assert not late.mesh.household_trust.devices()
    assert anna.mesh.household_trust.invite() == right
    await together(anna, late)


async def test_a_window_goes_on_in_the_next_process_as_it_was(home: Household) -> None:
    async with home.running("anna", code=None) as anna:
        right = anna.shown(Pairing)[0].code
        wrong = f"{(int(right) + 1) % 10**8:08d}"
        async with home.running("bert", code=wrong) as bert:
            await bert.until(lambda: bool(bert.shown(PairingFailed)))
    left = anna.mesh.household_trust.window
    assert left is not None
    assert left.tries_left == 4
    again = await home.start("anna", code=None, window=left)
    assert again.mesh.household_trust.window == left
    await together(again, await home.start("cora", code=right))


async def test_a_window_that_a_removal_closed_does_not_go_on(home: Household) -> None:
    async with home.running("anna") as anna, home.running("bert") as bert:
        cora = await home.start("cora")
        await together(anna, bert, cora)
        anna.mesh.household_trust.remove("bert")
    assert anna.mesh.household_trust.window is None
    again = await home.start("anna", code=None, window=anna.mesh.household_trust.window)
    await together(again, cora)
    assert again.mesh.household_trust.window is None
    assert again.shown(Pairing) == []


async def test_a_window_that_is_over_is_not_opened_again(home: Household) -> None:
    anna, bert = await home.start("anna"), await home.start("bert")
    await together(anna, bert)
    await anna.mesh.leave()
    now = asyncio.get_running_loop().time()
    over = PairingWindow(CODE, closes_at=now - 1.0)
    again = await home.start("anna", code=None, window=over)
    assert again.mesh.household_trust.window is None
    assert again.shown(Pairing) == []


async def test_a_copied_identity_stops_the_younger(home: Household, tmp_path: Path) -> None:
    anna, bert = await home.start("anna"), await home.start("bert")
    await together(anna, bert)
    unwritten = shutil.ignore_patterns("*.tmp")  # it may be writing a file just now
    shutil.copytree(tmp_path / "anna", tmp_path / "copy", ignore=unwritten)
    with pytest.raises(UserError, match="another running device uses the identity"):
        async with home.running("copy", name="anna", code=None) as copy:
            await copy.until(lambda: False)
    assert anna.alive() == {"anna", "bert"}
    await together(anna, bert)


async def test_one_members_odd_name_costs_no_link_of_others(home: Household) -> None:
    anna, bert, cora = [await home.start(name) for name in ("anna", "bert", "cora")]
    await together(anna, bert, cora)
    me = cora.mesh.self_id
    record = cora.mesh.membership_driver.membership.members[me]
    said = {"id": me, "name": "c/o", "inc": record.incarnation + 1, "state": "alive"}
    claim = {**said, "info": {}, "run": record.instance}
    payload = {"kind": "gossip", "claims": [claim]}
    await cora.mesh.send(anna.mesh.self_id, Message(MEMBERSHIP_KIND, {"payload": payload}))
    await anna.until(lambda: "c_o" in {d.name for d in anna.mesh.household_trust.devices()})
    heard: list[MeshEvent] = []
    by_bert: list[MeshEvent] = []
    anna.mesh.subscribe(heard.append)
    bert.mesh.subscribe(by_bert.append)
    bert.mesh.connections.cut(anna.mesh.self_id, "pulled")
    await anna.until(lambda: LinkUp(bert.mesh.self_id) in heard)
    await bert.until(lambda: LinkUp(anna.mesh.self_id) in by_bert)
    for _ in range(3):  # what is reported at once when a link comes up has been taken in by then
        await bert.mesh.call(anna.mesh.self_id, Message("mesh.ping"), timeout_seconds=5)
        await anna.mesh.call(bert.mesh.self_id, Message("mesh.ping"), timeout_seconds=5)
    assert len([event for event in heard if isinstance(event, LinkLost)]) == 1


async def test_whatever_a_member_answers_ends_no_device(home: Household, tmp_path: Path) -> None:
    """Anna asks bert's first process whether it lives, as a second one has come."""
    anna, bert = await home.start("anna"), await home.start("bert")
    await together(anna, bert)

    async def refuse(_peer: str, _message: Message) -> Message:
        raise UserError("stop")

    bert.mesh.route("mesh.ping", refuse)
    receiver = Inbox()
    link = await dialled(anna, tmp_path, "bert", receiver)
    await link.send(to_message(Hello("bert", "0" * 16, 0.1, bert.mesh.port, token="t")))
    assert (await receiver.count(1))[0].kind == "mesh.hello"
    link.abort()
    await together(anna, bert)


async def test_a_renamed_coordinator_is_called_so_by_all(home: Household) -> None:
    devices = [await home.start(folder, name="twin") for folder in ("anna", "bert")]

    def agreed() -> bool:
        told = {d.mesh.coordinator for d in devices}
        names = {d.mesh.self_id: d.mesh.name for d in devices}
        leader = told.pop() if len(told) == 1 else None
        return sorted(names.values()) == ["twin", "twin-2"] and (
            leader is not None and names[leader.id] == leader.name
        )

    await devices[0].until(agreed)


class _Stranger:
    """A receiver that only notes how its link ended."""

    def __init__(self) -> None:
        self.ended: asyncio.Future[PeerError] = asyncio.get_running_loop().create_future()

    def open_parts(self, link: Link, header: Header) -> list[memoryview]:
        raise AssertionError

    def deliver(self, link: Link, message: Message) -> None:
        raise AssertionError

    def lost(self, link: Link, error: PeerError) -> None:
        self.ended.set_result(error)


async def test_a_stranger_with_a_certificate_of_its_own_is_refused(
    home: Household, tmp_path: Path
) -> None:
    anna = await home.start("anna")
    receiver = _Stranger()
    link = await dialled(anna, tmp_path, "stranger", receiver)
    hello = Hello("mallory", "0" * 16, 1.0, 1)
    with contextlib.suppress(LinkClosed):  # the refusal may have come by now
        await link.send(to_message(hello))
    assert isinstance(await receiver.ended, NotPaired)
    assert anna.alive() == {"anna"}


async def test_a_port_that_is_taken_is_said(home: Household) -> None:
    anna = await home.start("anna")
    with pytest.raises(OptionError, match="of this device is taken"):
        async with home.running("bert", port=anna.mesh.port):
            raise AssertionError


async def test_a_device_that_left_answers_no_more(home: Household) -> None:
    async with home.running("anna") as anna:
        await anna.mesh.leave()
        await anna.mesh.leave()
        with pytest.raises(LinkClosed):
            await anna.mesh.send(anna.mesh.self_id, Message("mesh.ping"))
