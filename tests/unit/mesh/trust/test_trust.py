"""Trust records: who may say what, and that all orders of arrival end in the same book."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import ssl
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain.errors import PairingError, ProtocolError, UserError
from p2ptrain.mesh.identity.identity import Identity, load_or_create
from p2ptrain.mesh.identity.state_folder import StateFolder
from p2ptrain.mesh.trust import trust
from p2ptrain.mesh.trust.trust import (
    COUNTER_JUMP_LIMIT,
    TrustedDevice,
    TrustRecord,
    after_pairing,
    after_removal,
    decode_record,
    encode_record,
    judge,
    sign_record,
)
from p2ptrain.mesh.trust.trust_store import TRUST_FILE, TrustStore
from p2ptrain.net import cbor
from p2ptrain.net.transport.tls import certificate_id, client_context, server_context

Devices = dict[str, Identity]


@pytest.fixture(scope="module")
def devices(tmp_path_factory: pytest.TempPathFactory) -> Devices:
    root: Path = tmp_path_factory.mktemp("devices")
    return {name: load_or_create(StateFolder(root / name)) for name in ("me", "anna", "bert")}


def entry(
    device: Identity, by: Identity, counter: int = 1, *, revoked: bool = False
) -> TrustedDevice:
    return TrustedDevice(device.id, device.certificate_der, "name", counter, revoked, by.id)


def book_of(*entries: TrustedDevice) -> dict[str, TrustedDevice]:
    return {known.id: known for known in entries}


def test_a_trusted_device_introduces_another(devices: Devices) -> None:
    me, anna, bert = devices.values()
    record = sign_record(entry(bert, me), anna)
    verdict = judge(record, book_of(entry(anna, me)), me.id)
    assert verdict.entry == entry(bert, anna)
    assert verdict.reason == "introduced"


def test_strangers_and_removed_devices_introduce_no_device(devices: Devices) -> None:
    me, anna, bert = devices.values()
    record = sign_record(entry(bert, me), anna)
    assert judge(record, {}, me.id).reason == "its signer is not trusted"
    removed = book_of(entry(anna, me, 2, revoked=True))
    assert judge(record, removed, me.id).reason == "its signer is not trusted"


def test_a_changed_or_borrowed_signature_does_not_count(devices: Devices) -> None:
    me, anna, bert = devices.values()
    book = book_of(entry(anna, me))
    record = sign_record(entry(bert, me), anna)
    changed = replace(record, device=replace(record.device, counter=7))
    borrowed = TrustRecord(record.device, bert.sign(b"something"))
    for false in (changed, borrowed):
        assert judge(false, book, me.id).reason == "its signature is wrong"


def made_up(certificate: bytes, by: Identity) -> TrustedDevice:
    return TrustedDevice(hashlib.sha256(certificate).hexdigest(), certificate, "x", 1, False, by.id)


@pytest.mark.parametrize("certificate", [b"", b"no certificate at all", b"0\x03\x02\x01\x05"])
def test_what_is_no_certificate_is_believed_of_no_device(
    devices: Devices, certificate: bytes
) -> None:
    me, anna, _ = devices.values()
    record = decode_record(encode_record(sign_record(made_up(certificate, anna), anna)))
    assert judge(record, book_of(entry(anna, me)), me.id)[:2] == (None, "its certificate is none")


def test_two_certificates_are_not_one(devices: Devices) -> None:
    me, anna, bert = devices.values()
    both = made_up(bert.certificate_der + anna.certificate_der, anna)
    record = sign_record(both, anna)
    assert judge(record, book_of(entry(anna, me)), me.id).entry is None


def test_a_store_with_what_is_no_certificate_forgets_that_alone(
    devices: Devices, tmp_path: Path
) -> None:
    """Earlier releases believed such records, and could not start any more."""
    me, anna, _ = devices.values()
    folder = StateFolder(tmp_path / "state")
    TrustStore(folder, me).add_paired(anna.certificate_der, "anna")
    kept, none = folder.read_json(TRUST_FILE), b"no certificate at all"
    odd = {"id": certificate_id(none), "certificate": base64.b64encode(none).decode()}
    folder.write_json(
        TRUST_FILE, {**kept, "devices": [*kept["devices"], {**kept["devices"][0], **odd}]}
    )
    again = TrustStore(folder, me)
    assert list(again.book) == [anna.id]


def agree(client: ssl.SSLContext, server: ssl.SSLContext) -> bool:
    """Whether each side accepts the certificate of the other."""
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        client.wrap_bio(to_client, to_server),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    try:
        for side in sides * 2:
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    except ssl.SSLCertVerificationError:
        return False
    return True


def test_tls_contexts_are_made_again_once_others_are_trusted(
    devices: Devices, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S4: a removal counts from the next connection on, though the disk is full."""
    me, anna, bert = devices.values()
    store = TrustStore(StateFolder(tmp_path / "state"), me)

    def full(_folder: StateFolder, _name: str, _content: bytes) -> None:
        raise UserError("the disk is full")

    def may_connect(device: Identity) -> list[bool]:
        """As the one that dials, and as the one that is dialled."""
        pem, pinned = device.pem_file, [me.certificate_der]
        return [
            agree(client_context(pem, pinned), store.server_context()),
            agree(store.client_context(), server_context(pem, pinned)),
        ]

    assert may_connect(anna) == may_connect(bert) == [False, False]
    store.add_paired(anna.certificate_der, "anna")
    store.add_paired(bert.certificate_der, "bert")
    assert may_connect(anna) == may_connect(bert) == [True, True]
    before = store.server_context()
    assert store.rename(anna.id, "anna-2")
    assert store.server_context() is before, "a name is not what it accepts"
    removal = sign_record(after_removal(store.book[bert.id], anna.id), anna)
    monkeypatch.setattr(StateFolder, "write", full)
    with pytest.raises(UserError):
        store.take(removal)
    assert (may_connect(anna), may_connect(bert)) == ([True, True], [False, False])


def test_no_device_decides_about_this_device(devices: Devices) -> None:
    me, anna, _ = devices.values()
    record = sign_record(entry(me, anna, 9, revoked=True), anna)
    assert judge(record, book_of(entry(anna, me)), me.id).entry is None


def test_no_device_vouches_for_itself(devices: Devices) -> None:
    me, anna, _ = devices.values()
    book = book_of(entry(anna, me))
    for revoked in (False, True):
        record = sign_record(entry(anna, anna, 9, revoked=revoked), anna)
        assert judge(record, book, me.id).reason == "it is about its own signer"


def test_a_removed_device_does_not_outbid_its_removal(devices: Devices, tmp_path: Path) -> None:
    """Bert reaches anna, who has been off, before the word of its removal does."""
    me, anna, bert = devices.values()
    mine = TrustStore(StateFolder(tmp_path / "me"), me)
    annas = TrustStore(StateFolder(tmp_path / "anna"), anna)
    for store, others in ((mine, (anna, bert)), (annas, (me, bert))):
        for other in others:
            store.add_paired(other.certificate_der, "name")
    mine.revoke(bert.id)
    annas.take(sign_record(entry(bert, bert, 1000), bert))
    annas.take(mine.record(bert.id))
    mine.take(annas.record(bert.id))
    assert mine.is_removed(bert.id)
    assert annas.is_removed(bert.id)


def test_an_old_introduction_does_not_bring_a_removed_device_back(devices: Devices) -> None:
    me, anna, bert = devices.values()
    old = sign_record(entry(bert, anna), anna)
    book = book_of(entry(anna, me), after_removal(entry(bert, me), me.id))
    assert judge(old, book, me.id).reason == "nothing new"


def test_pairing_again_raises_the_counter(devices: Devices) -> None:
    me, _, bert = devices.values()
    removed = after_removal(entry(bert, me), me.id)
    again = after_pairing(book_of(removed), bert.certificate_der, "bert", me.id).entry
    assert again is not None
    assert (again.counter, again.revoked) == (removed.counter + 1, False)
    harmless = after_pairing(book_of(again), bert.certificate_der, "bert", me.id).entry
    assert harmless == again


def test_a_counter_cannot_jump_out_of_reach(devices: Devices) -> None:
    me, anna, bert = devices.values()
    book = book_of(entry(anna, me), entry(bert, me))
    far = sign_record(entry(bert, anna, COUNTER_JUMP_LIMIT + 2, revoked=True), anna)
    near = sign_record(entry(bert, anna, COUNTER_JUMP_LIMIT + 1, revoked=True), anna)
    assert judge(far, book, me.id).reason == "its counter jumps"
    assert judge(near, book, me.id).entry is not None


def test_the_book_is_bounded(devices: Devices) -> None:
    me, anna, bert = devices.values()
    record = sign_record(entry(bert, me), anna)
    assert judge(record, book_of(entry(anna, me)), me.id, limit=1).entry is None
    book = book_of(entry(anna, me))
    verdict = after_pairing(book, bert.certificate_der, "bert", me.id, limit=1)
    assert verdict.entry is None


def ghosts(count: int, by: Identity, first: int = 0) -> list[TrustedDevice]:
    numbers = range(first, first + count)
    return [made_up(number.to_bytes(4, "big"), by) for number in numbers]


def test_no_device_fills_the_book_and_a_person_can_always_pair(devices: Devices) -> None:
    """Half of what is left is for one introducer, so that never all of it is gone."""
    me, anna, bert = devices.values()
    book = book_of(entry(anna, me), *ghosts(126, anna))
    assert trust.introductions(anna.id, book) == (126, 127)
    record = sign_record(entry(bert, me), anna)
    assert judge(record, book, me.id).entry is not None
    book |= book_of(*ghosts(1, anna, 1000))
    verdict = judge(record, book, me.id)
    assert (verdict.entry, verdict.too_many) == (None, True)
    assert verdict.reason == "name has introduced 127 devices already"
    assert after_pairing(book, bert.certificate_der, "bert", me.id).entry is not None


def test_in_a_full_book_removed_devices_of_removed_introducers_make_room(
    devices: Devices,
) -> None:
    me, anna, bert = devices.values()
    gone = [replace(ghost, revoked=True) for ghost in ghosts(2, anna)]
    kept = replace(ghosts(1, me, 9)[0], revoked=True)
    book = book_of(entry(anna, me, 2, revoked=True), *gone, kept)
    verdict = after_pairing(book, bert.certificate_der, "bert", me.id, limit=4)
    assert verdict.entry is not None
    assert verdict.gone == gone[0].id


def test_removing_devices_makes_room_for_others(devices: Devices, tmp_path: Path) -> None:
    """What the message advises helps."""
    me, anna, bert = devices.values()
    store = TrustStore(StateFolder(tmp_path / "state"), me, devices_limit=1)
    store.add_paired(anna.certificate_der, "anna")
    with pytest.raises(PairingError, match="remove devices first"):
        store.add_paired(bert.certificate_der, "bert")
    store.revoke(anna.id)
    assert store.add_paired(bert.certificate_der, "bert")[1] == anna.id
    assert list(TrustStore(StateFolder(tmp_path / "state"), me).book) == [bert.id]


@settings(max_examples=20, deadline=None)
@given(said=st.lists(st.tuples(st.integers(1, 5), st.booleans()), max_size=6), data=st.data())
def test_every_order_of_arrival_ends_in_the_same_book(
    devices: Devices, said: list[tuple[int, bool]], data: st.DataObject
) -> None:
    me, anna, bert = devices.values()
    records = [sign_record(entry(bert, me, n, revoked=revoked), anna) for n, revoked in said]
    ends = []
    for order in (records, data.draw(st.permutations(records))):
        book = book_of(entry(anna, me))
        for record in order:
            verdict = judge(record, book, me.id)
            if verdict.entry is not None:
                book[verdict.entry.id] = verdict.entry
        ends.append(book)
    assert ends[0] == ends[1]
    if said:
        last = ends[0][bert.id]
        assert (last.counter, last.revoked) == max(said)


def test_records_survive_the_wire(devices: Devices) -> None:
    me, anna, bert = devices.values()
    record = sign_record(entry(bert, me), anna)
    assert decode_record(encode_record(record)) == record


@pytest.mark.parametrize(
    ("position", "value"),
    [
        (0, "0" * 64),
        (0, 5),
        (1, b"other certificate"),
        (2, "../../etc/passwd"),
        (2, "\x1b[31m"),
        (3, 0),
        (3, -1),
        (3, 2**63),
        (4, 1),
        (5, "not an id"),
        (6, "text"),
    ],
)
def test_malformed_records_are_refused(devices: Devices, position: int, value: object) -> None:
    me, anna, bert = devices.values()
    items = cbor.loads(encode_record(sign_record(entry(bert, me), anna)), 4096)
    items[position] = value
    with pytest.raises(ProtocolError):
        decode_record(cbor.dumps(items))


def test_the_store_keeps_what_it_was_given(devices: Devices, tmp_path: Path) -> None:
    me, anna, bert = devices.values()
    folder = StateFolder(tmp_path / "state")
    store = TrustStore(folder, me)
    store.add_paired(anna.certificate_der, "anna")
    assert store.take(sign_record(entry(bert, anna), anna)).entry is not None
    store.rename(bert.id, "bertram")
    store.revoke(anna.id)
    again = TrustStore(folder, me)
    assert again.book == store.book
    assert list(again.trusted) == [bert.id]
    assert again.book[bert.id].name == "bertram"
    assert not again.is_trusted(anna.id)


def test_a_stored_name_that_no_device_may_have_is_replaced(
    devices: Devices, tmp_path: Path
) -> None:
    """An earlier release took it from any device, and others end the link that brings it."""
    me, anna, _bert = devices.values()
    folder = StateFolder(tmp_path / "state")
    TrustStore(folder, me).add_paired(anna.certificate_der, "a/b")
    (record,) = TrustStore(folder, me).records()
    assert decode_record(encode_record(record)).device.name == "a_b"


def test_a_name_counts_though_it_cannot_be_written_but_nothing_else_does(
    devices: Devices, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    me, anna, bert = devices.values()
    store = TrustStore(StateFolder(tmp_path / "state"), me)
    store.add_paired(anna.certificate_der, "anna")

    def full(_self: StateFolder, name: str, _content: bytes) -> None:
        raise UserError(f"{name} cannot be written: No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(StateFolder, "write", full)
        assert store.rename(anna.id, "annette")
        with pytest.raises(UserError):
            store.save()
        with pytest.raises(UserError):
            store.revoke(anna.id)
        with pytest.raises(UserError):
            store.add_paired(bert.certificate_der, "bert")
    assert store.name(anna.id) == "annette"
    assert list(store.trusted) == [anna.id]


def test_a_full_store_says_so(devices: Devices, tmp_path: Path) -> None:
    me, anna, _ = devices.values()
    store = TrustStore(StateFolder(tmp_path / "state"), me, devices_limit=0)
    with pytest.raises(PairingError, match="remove devices first"):
        store.add_paired(anna.certificate_der, "anna")


@pytest.mark.parametrize(
    "content",
    [
        *("{}", "[]", '{"format": "other"}', '{"format": 1'),
        *('{"devices": []}', '{"format": "p2ptrain.trusted/1", "devices": [{"counter": 1e999}]}'),
    ],
)
def test_a_broken_store_says_what_to_do(devices: Devices, tmp_path: Path, content: str) -> None:
    folder = StateFolder(tmp_path / "state")
    folder.write(TRUST_FILE, content.encode())
    with pytest.raises(UserError, match=r"trusted\.json is broken"):
        TrustStore(folder, devices["me"])
