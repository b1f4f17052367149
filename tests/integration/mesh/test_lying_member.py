"""A member gone bad, over real links: it is named and cut off, and the others stay together.

Anna and bert are honest; eve is a member like any other until she says what is not so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from p2ptrain import events
from p2ptrain.events import Member
from p2ptrain.mesh.identity import device_record
from p2ptrain.mesh.identity.device_record import DEVICE_FILE
from p2ptrain.mesh.identity.identity import load_or_create
from p2ptrain.mesh.identity.state_folder import StateFolder
from p2ptrain.mesh.interface import MemberState
from p2ptrain.mesh.membership.core_events import MemberRecord
from p2ptrain.mesh.membership.core_messages import (
    Claim,
    ElectionKind,
    ElectionMessage,
    MembershipKind,
    MembershipMessage,
    encode,
)
from p2ptrain.mesh.membership_driver import ELECTION_KIND, MEMBERSHIP_KIND
from p2ptrain.mesh.trust.trust import TrustedDevice, encode_record, sign_record
from p2ptrain.mesh.trust.trust_store import TrustStore
from p2ptrain.mesh.trust_exchange import TRUST_KIND
from p2ptrain.messages.kinds import STARTED, VALUES
from p2ptrain.messages.round_orders import GenerationKey
from p2ptrain.messages.tensors import StreamId
from p2ptrain.net.message import Fields, Message
from p2ptrain.net.transport.tls import certificate_id
from p2ptrain.runtime.io.tensor_router import StreamReceiver, TensorRouter
from tests.integration.mesh.test_network_mesh import home as home
from tests.integration.mesh.test_network_mesh import together
from tests.support.mesh_household import Device, Household


class Nothing(StreamReceiver):
    """Takes no frame."""

    def open(self, peer: str, fields: Fields, part_bytes: Sequence[int]) -> Sequence[memoryview]:
        """None is meant to come."""
        raise AssertionError

    def deliver(self, peer: str, fields: Fields) -> None:
        """As `open`."""
        raise AssertionError

    def fail(self, error: Exception) -> None:
        """As `open`."""
        raise AssertionError


@pytest.fixture
async def three(home: Household) -> tuple[Device, Device, Device]:
    anna, bert, eve = [await home.start(name) for name in ("anna", "bert", "eve")]
    await together(anna, bert, eve)
    return anna, bert, eve


async def say(liar: Device, to: Device, kind: str, fields: Fields) -> None:
    """Send it as soon as there is a link; nothing where there is none any more."""
    link = liar.mesh.connections.link(to.mesh.self_id)
    if link is not None:
        await link.link.send(Message(kind, fields))


async def claim(liar: Device, to: Device, *records: MemberRecord) -> None:
    message = MembershipMessage(MembershipKind.GOSSIP, tuple(map(Claim, records)))
    await say(liar, to, MEMBERSHIP_KIND, {"payload": encode(message)})


def record_of(device: Device, member: Device) -> MemberRecord:
    return device.mesh.membership_driver.membership.members[member.mesh.self_id]


def of_eve(device: Device) -> list[str]:
    return [warned.message for warned in device.shown(events.Warning) if warned.name == "eve"]


async def cut_off(device: Device, liar: Device) -> None:
    """Wait until that device listens to the liar no more, and has said so."""
    await device.until(lambda: liar.mesh.self_id in device.mesh.household_trust.cut_off)
    await device.until(lambda: liar.mesh.self_id not in device.mesh.members)
    assert liar.mesh.self_id not in device.mesh.connected
    assert "does not talk to it any more, until this device starts again" in of_eve(device)[-1]
    (listed,) = [d for d in device.mesh.household_trust.devices() if d.name == "eve"]
    assert listed.cut_off is not None


async def still_alive(anna: Device, bert: Device) -> None:
    """The two see each other, without a death in between."""
    await anna.until(lambda: record_of(anna, bert).state is MemberState.ALIVE, 2.0)
    states = {e.state for d in (anna, bert) for e in d.shown(Member) if e.name != "eve"}
    assert states <= {"alive", "suspect"}


@pytest.mark.parametrize("state", [MemberState.DEAD, MemberState.LEFT, MemberState.SUSPECT])
async def test_s18_false_ends_are_not_believed_and_their_teller_is_cut_off(
    three: tuple[Device, Device, Device], state: MemberState
) -> None:
    """S18: the victim contradicts within two seconds and stays; the liar is named."""
    anna, bert, eve = three
    async with asyncio.timeout(20.0):
        while eve.mesh.self_id not in anna.mesh.household_trust.cut_off:
            known = record_of(anna, bert)
            await claim(eve, anna, replace(known, state=state, incarnation=known.incarnation + 1))
            await asyncio.sleep(0.001)
    await cut_off(anna, eve)
    await still_alive(anna, bert)
    assert anna.mesh.connected == {bert.mesh.self_id}


async def test_s18_ghosts_are_not_listed_and_who_tells_of_them_is_cut_off(
    three: tuple[Device, Device, Device],
) -> None:
    """S18: ten thousand members that are not paired, absurd incarnations among them."""
    anna, bert, eve = three
    for page in range(1000):
        ghosts = [
            MemberRecord(f"{page:032x}{n:032x}", "ghost", 2**48 if n % 2 else 0) for n in range(10)
        ]
        await claim(eve, anna, *ghosts)
    await cut_off(anna, eve)
    assert anna.mesh.members.keys() == {anna.mesh.self_id, bert.mesh.self_id}


async def test_renames_without_end_are_neither_written_nor_heard(
    three: tuple[Device, Device, Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    anna, bert, eve = three
    written = 0
    save = TrustStore.save

    def count(store: TrustStore) -> None:
        nonlocal written
        written += 1
        save(store)

    monkeypatch.setattr(TrustStore, "save", count)
    me = record_of(eve, eve)
    for number in range(2500):
        renamed = replace(me, name=f"eve{number}", incarnation=me.incarnation + 1 + number)
        await claim(eve, anna, renamed)
    await anna.until(lambda: eve.mesh.self_id in anna.mesh.household_trust.cut_off)
    warned = anna.shown(events.Warning)[-1]
    assert "changes its name again and again" in warned.message
    assert written <= 2
    assert device_record.PAUSE_SECONDS >= 1.0
    await still_alive(anna, bert)


async def test_a_report_of_a_copied_identity_ends_no_device(
    three: tuple[Device, Device, Device],
) -> None:
    anna, bert, eve = three
    for _ in range(20):
        await say(eve, anna, "mesh.refused", {"reason": "copied", "version": 3, "software": "x"})
    await cut_off(anna, eve)
    await still_alive(anna, bert)


@pytest.mark.parametrize(
    "lie",
    [
        ElectionMessage(ElectionKind.STALE, 1 << 20),
        ElectionMessage(ElectionKind.ANNOUNCE, 1 << 40, support=9),
        ElectionMessage(ElectionKind.VOTE, 1 << 53),
    ],
)
async def test_s17_absurd_terms_split_no_household_and_their_sender_is_cut_off(
    three: tuple[Device, Device, Device], lie: ElectionMessage
) -> None:
    """S17: the mesh's side; the fence of a job is the holder's."""
    anna, bert, eve = three
    for number in range(200):
        said = replace(lie, term=min(lie.term + (number << 20), 1 << 53))
        await say(eve, anna, ELECTION_KIND, {"payload": encode(said)})
    await cut_off(anna, eve)
    await still_alive(anna, bert)
    assert anna.mesh.membership_driver.election.term < 20
    assert anna.mesh.connected == {bert.mesh.self_id}


@pytest.mark.parametrize("term", [4_194_305, 2**52])
async def test_a_poisoned_folder_heals_by_itself(
    home: Household, tmp_path: Path, term: int
) -> None:
    async with home.running("anna") as anna, home.running("bert") as bert:
        await together(anna, bert)
    folder = StateFolder(tmp_path / "bert")
    folder.write_json(DEVICE_FILE, {**folder.read_json(DEVICE_FILE), "term": term})
    anna, bert = await home.start("anna", code=None), await home.start("bert", code=None)
    await together(anna, bert)
    assert anna.mesh.coordinator is not None
    assert anna.mesh.coordinator.term < 20
    await bert.until(lambda: folder.read_json(DEVICE_FILE)["term"] < 20)
    assert not anna.shown(events.Warning)


async def test_introductions_by_the_hundred_leave_room_and_cut_off_who_makes_them(
    three: tuple[Device, Device, Device], tmp_path: Path
) -> None:
    anna, _bert, eve = three
    signer = load_or_create(StateFolder(tmp_path / "eve"))
    ghosts = [f"ghost {n}".encode() for n in range(125)]
    store = anna.mesh._trust
    made_up = [
        TrustedDevice(certificate_id(ghost), ghost, ghost.decode(), 1, False, signer.id)
        for ghost in ghosts
    ]
    store._book = {**store.book, **{entry.id: entry for entry in made_up}}
    for number in range(700):
        other = load_or_create(StateFolder(tmp_path / "others" / str(number % 20)))
        entry = TrustedDevice(other.id, other.certificate_der, "ghost", 1, False, signer.id)
        fields = {"record": encode_record(sign_record(entry, signer)), "addresses": []}
        await say(eve, anna, TRUST_KIND, fields)
        await asyncio.sleep(0)
    await cut_off(anna, eve)
    assert len(store.book) <= 2 + 127
    carl = load_or_create(StateFolder(tmp_path / "carl"))
    entry, gone = store.add_paired(carl.certificate_der, "carl")
    assert (entry.name, gone) == ("carl", None)


async def test_malformed_messages_name_their_sender_and_cut_it_off(
    three: tuple[Device, Device, Device],
) -> None:
    """S6: who sends them is known by its certificate, whatever they say."""
    anna, bert, eve = three
    for _ in range(20):
        if eve.mesh.self_id in anna.mesh.household_trust.cut_off:
            break
        await say(eve, anna, MEMBERSHIP_KIND, {"payload": {"kind": "ping", "claims": 7}})
        await eve.until(lambda: anna.mesh.self_id not in eve.mesh.connected, 5.0)
        reconnected = eve.mesh.connected
        for _ in range(100):
            if anna.mesh.self_id in reconnected or anna.mesh.household_trust.cut_off:
                break
            await asyncio.sleep(0.02)
            reconnected = eve.mesh.connected
    await cut_off(anna, eve)
    assert "claims: expected a list" in of_eve(anna)[0]
    await still_alive(anna, bert)


@pytest.mark.parametrize("what", ["values", "values with parts", "credit"])
async def test_who_sends_values_in_the_place_of_another_device_is_named_and_cut_off(
    three: tuple[Device, Device, Device], what: str
) -> None:
    """The link stands until then: what others send over theirs is taken meanwhile."""
    anna, bert, eve = three
    key = GenerationKey("job", 1)
    board = TensorRouter(anna.mesh)
    board.connect_receiver(StreamId(key, 1, "activations"), Nothing(), [bert.mesh.self_id])
    kind = STARTED if what == "credit" else VALUES
    for number in range(20):
        fields = StreamId(key, number % 2, "activations").fields()
        parts = (memoryview(bytes(1 << 16)),) if "parts" in what else ()
        link = eve.mesh.connections.link(anna.mesh.self_id)
        if link is not None:
            await link.link.send(Message(kind, fields, parts))
    await cut_off(anna, eve)
    assert "sends what only other devices of a job may send" in of_eve(anna)[0]
    await still_alive(anna, bert)


async def test_who_was_cut_off_is_heard_again_after_a_restart(
    home: Household, tmp_path: Path
) -> None:
    eve = await home.start("eve")
    async with home.running("anna") as anna:
        await together(anna, eve)
        for _ in range(20):
            await say(eve, anna, "mesh.refused", {"reason": "copied"})
        await cut_off(anna, eve)
    anna = await home.start("anna", code=None)
    await together(anna, eve)
