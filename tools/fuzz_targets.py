"""What p2ptrain decodes of what others say or what lay on a disk, each by name, with good examples.

A target takes bytes. Where it decodes plain data, the bytes are CBOR (or JSON) of it, so that what
a mutation changes is the data and not only its encoding.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import cbor2
import lz4.block
import torch
from zeroconf import DNSIncoming

from p2ptrain import events
from p2ptrain.api.job_course import CourseAsked, CourseKeeper, EarlierRuns, JobCourse
from p2ptrain.api.job_desk import SteerRequest
from p2ptrain.api.progress import JobLine
from p2ptrain.control.lease import LeasedIdentity, place_fields, read_place
from p2ptrain.coordinator.measured_cluster import MeasuredCluster, MeasuredDevice
from p2ptrain.coordinator.plan_question import Near, PlanQuestion
from p2ptrain.coordinator.service import PlanWish
from p2ptrain.errors import Error, ProtocolError
from p2ptrain.files import SealBroken, open_json, seal_json
from p2ptrain.holder.start import journal
from p2ptrain.job.rounds import Round, RoundMode
from p2ptrain.job.train_options import ReplanMethod
from p2ptrain.mesh.discovery.addresses import parse, service_name
from p2ptrain.mesh.identity import identity
from p2ptrain.mesh.identity.device_record import DeviceRecord
from p2ptrain.mesh.identity.state_folder import StateFolder
from p2ptrain.mesh.links import hello, router
from p2ptrain.mesh.membership import core_messages
from p2ptrain.mesh.trust import pairing, trust
from p2ptrain.mesh.trust.pairing_window import KnownCodes, PairingWindow
from p2ptrain.mesh.trust.trust_store import TrustStore
from p2ptrain.messages.assign import Fetches
from p2ptrain.messages.assignment import Assignment, StageAssignment
from p2ptrain.messages.job_requests import (
    LinksAnswer,
    LinksAsked,
    PrepareReply,
    ProfileAnswer,
    ProfileAsked,
    StateRequest,
)
from p2ptrain.messages.plan_request import JobPlanRequest, PassedOver, SharingLimits
from p2ptrain.messages.round_orders import (
    Commit,
    EndOfRounds,
    FailureReport,
    GenerationKey,
    RoundOrder,
)
from p2ptrain.messages.snapshots import (
    BackupAssignment,
    RangeRequest,
    RetainSnapshots,
    SnapshotKept,
    SnapshotOffer,
)
from p2ptrain.messages.tensors import (
    MicroBatchKey,
    MicroBatchSlice,
    ResendLogged,
    ResendSamples,
    StreamId,
)
from p2ptrain.model.graph.decoding import decode_model
from p2ptrain.model.stage.optimizer_form import OptimizerSpec
from p2ptrain.model.stage.optimizer_spec import (
    AdamW,
)
from p2ptrain.model.wire.tensor_codec import Unpacking, pack
from p2ptrain.net import cbor
from p2ptrain.net.decoder import FrameDecoder
from p2ptrain.net.fields import Blob, FrameFields
from p2ptrain.net.forms import write_form
from p2ptrain.net.frame import (
    FrameFlag,
    Header,
    decode_block,
    decode_header,
    decode_prefix,
    encode_header,
    pack_prefix,
)
from p2ptrain.net.message import Message, Priority
from p2ptrain.plan.replan.replica_holders import Replicas
from p2ptrain.plan.round_picture import Bar, PredictedRound, RoundPicture
from p2ptrain.plan.types.cluster import Cluster, ClusterDevice, ClusterLink
from p2ptrain.plan.types.memory_budgets import MemoryBudgets, MemoryShortage
from p2ptrain.plan.types.plan import Plan
from p2ptrain.plan.types.profile import Unit
from p2ptrain.plan.types.unit_times import TimeTable, UnitTimes
from p2ptrain.process.child_process import SearchPriority
from p2ptrain.profiling.boxed_measure import ProfileResult
from p2ptrain.profiling.measure_units import UnitMeasurements
from p2ptrain.recovery.fetch_plan import Fetch
from p2ptrain.recovery.rebuild_plan import Rebuild
from p2ptrain.recovery.standstill import ProgressCounters
from p2ptrain.recovery.state_report import (
    ReplayWindow,
    StageCopy,
    StateEntry,
    StateKind,
    StateReport,
)
from p2ptrain.recovery.version import Era, Lineage, Version
from p2ptrain.state import checkpoint_files
from p2ptrain.state.checksums import read_digest

LIMIT_BYTES = 1 << 20
OWN_ERRORS = (Error, SealBroken)
"""`SealBroken` is what readers of files make one of ours of."""
AT = Version(7, 2)
ME = "a" * 64


@dataclass(frozen=True, slots=True)
class Target:
    """One decoder.

    Attributes:
        decode: raises errors of p2ptrain's own for what it does not take.
        examples: what it takes.
    """

    name: str
    decode: Callable[[bytes], object]
    examples: Sequence[bytes]


def of_fields(read: Callable[[dict[str, Any]], object]) -> Callable[[bytes], object]:
    """A decoder of a header's fields."""

    def decode(data: bytes) -> object:
        fields = cbor.loads(data, LIMIT_BYTES)
        return read(fields) if isinstance(fields, dict) else None

    return decode


def of_value(read: Callable[[Any], object]) -> Callable[[bytes], object]:
    """A decoder of plain data."""
    return lambda data: read(cbor.loads(data, LIMIT_BYTES))


def of_json(read: Callable[[Any], object]) -> Callable[[bytes], object]:
    """A decoder of a JSON file's content."""

    def decode(data: bytes) -> object:
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            return None
        return read(value)

    return decode


@cache
def targets() -> Mapping[str, Target]:
    """All of them, by name."""
    found = [*_net(), *_mesh(), *_training(), *_plans(), *_files()]
    return {target.name: target for target in found}


def mutated(data: bytes, dice: random.Random) -> bytes:
    """Something near `data`: its plain data changed at a place, or its bytes."""
    if dice.random() < 0.6:
        for loads, dumps in ((cbor2.loads, cbor2.dumps), (json.loads, _json)):
            try:
                return bytes(dumps(_changed(loads(data), dice)))
            except Exception:  # none of that encoding, or junk that it cannot carry
                continue
    raw = bytearray(data)
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(len(raw) + 1)
        match dice.randrange(4):
            case 0 if raw:
                raw[at % len(raw)] ^= 1 << dice.randrange(8)
            case 1:
                raw[at:at] = dice.randbytes(dice.randint(1, 8))
            case 2:
                del raw[at : at + dice.randint(1, 8)]
            case _:
                raw[at:at] = raw[: dice.randint(0, 32)]
    return bytes(raw)


_JUNK: Sequence[Any] = (
    *(None, True, False, 0, -1, 1, 2**53, 2**63, -(2**63), 10**30, 0.0, -1.5, 1e308, 1e-320),
    *(
        float("nan"),
        float("inf"),
        "",
        "a",
        "x" * 70,
        "\x1b[2J",
        "\u202e",
        "\u3000",
        "../a",
        "é" * 300,
    ),
    *([], {}, [[]], ["a"], {"a": 1}, [0] * 70, b"", b"\x00" * 40),
)


def _changed(value: Any, dice: random.Random) -> Any:
    """A copy with one place changed, at any depth."""
    if isinstance(value, dict) and value and dice.random() < 0.85:
        key = dice.choice(list(value))
        if dice.random() < 0.1:
            return {k: v for k, v in value.items() if k != key}
        if dice.random() < 0.05:
            return {**value, dice.choice(["more", "", key + "x"]): dice.choice(_JUNK)}
        return {**value, key: _changed(value[key], dice)}
    if isinstance(value, list) and value and dice.random() < 0.85:
        at = dice.randrange(len(value))
        match dice.randrange(5):
            case 0:
                return value[:at] + value[at + 1 :]
            case 1:
                return value[:at] + [value[at]] * dice.randint(2, 5) + value[at:]
            case _:
                return [*value[:at], _changed(value[at], dice), *value[at + 1 :]]
    if isinstance(value, bytes) and value and dice.random() < 0.7:
        return mutated(value, dice)
    if isinstance(value, int) and dice.random() < 0.5:
        return value + dice.choice([-1, 1, 7, 1 << 20])
    return dice.choice(_JUNK)


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


# -- the targets -----------------------------------------------------------------------------------


def _net() -> list[Target]:
    header = encode_header("train.values", {"job": "j", "generation": 3, "values": [["a"]]})
    frame = pack_prefix(1, FrameFlag.FIRST | FrameFlag.LAST, len(header), 0, 0) + header
    block = lz4.block.compress(bytes(4096), store_size=False)
    return [
        Target(
            "cbor", of_value(lambda value: value), [cbor.dumps({"a": [1, 2.5, None, b"x", "y"]})]
        ),
        Target("header", decode_header, [header]),
        Target("prefix", lambda data: decode_prefix(data[:16].ljust(16)), [frame[:16]]),
        Target("frames", _frames, [frame]),
        Target(
            "lz4_block", lambda d: decode_block(memoryview(d), memoryview(bytearray(4096))), [block]
        ),
    ]


def _frames(data: bytes) -> int:
    """As a transport would bring them."""
    delivered: list[Message] = []

    def open_parts(_lane: Priority, header: Header) -> list[memoryview]:
        if sum(header.part_bytes) > LIMIT_BYTES:
            raise ProtocolError("not expected")
        return [memoryview(bytearray(size)) for size in header.part_bytes]

    decoder = FrameDecoder(open_parts, lambda _lane, message: delivered.append(message))
    left = memoryview(data)
    while left:
        buffer = decoder.get_buffer()
        count = min(len(buffer), len(left))
        buffer[:count] = left[:count]
        left = left[count:]
        decoder.received(count)
    return len(delivered)


@cache
def _own_identity() -> identity.Identity:
    with tempfile.TemporaryDirectory() as folder:
        return identity.load_or_create(StateFolder(Path(folder) / "state"))


def _mesh() -> list[Target]:
    me = _own_identity()
    record = trust.sign_record(
        trust.TrustedDevice(me.id, me.certificate_der, "pi", 1, False, me.id), me
    )
    claim = {
        "id": ME,
        "name": "pi",
        "inc": 3,
        "state": "alive",
        "info": {"threads": 4},
        "run": "ab12",
    }
    membership = [
        {"kind": "ping", "claims": [claim], "sequence": 4},
        {"kind": "sync", "claims": [], "digest": 5, "answer": True},
        {
            "kind": "req",
            "claims": [{**claim, "state": "suspect", "by": [ME]}],
            "sequence": 1,
            "target": ME,
        },
    ]
    election = [
        core_messages.encode(core_messages.ElectionMessage(kind, 3, leader="ab12" * 4))
        for kind in core_messages.ElectionKind
    ]
    said = hello.Hello("pi", "0" * 16, 3.0, 4000, addresses=("192.168.1.2",), info={"threads": 4})
    error = router.to_fields(ProtocolError("no"))
    client = pairing.PairingClient(me, "pi", "12345678", me.certificate_der)
    service = b"\x00\x00\x84\x00\x00\x00\x00\x01\x00\x00\x00\x00\x09_p2ptrain\x04_tcp\x05local\x00"
    return [
        Target(
            "membership",
            of_value(partial(core_messages.decode, core_messages.MembershipMessage)),
            list(map(cbor.dumps, membership)),
        ),
        Target(
            "election",
            of_value(partial(core_messages.decode, core_messages.ElectionMessage)),
            list(map(cbor.dumps, election)),
        ),
        Target(
            "hello",
            of_fields(lambda fields: hello.from_message(Message(hello.HELLO_KIND, fields))),
            [cbor.dumps(hello.to_message(said).fields)],
        ),
        Target(
            "refusal",
            of_fields(lambda fields: hello.refusal_of(Message("mesh.refused", fields))),
            [cbor.dumps(hello.refused(reason).fields) for reason in hello.LinkRefusal],
        ),
        Target("trust_record", trust.decode_record, [trust.encode_record(record)]),
        Target("remote_error", of_fields(router.from_fields), [cbor.dumps(error)]),
        Target("pairing_hello", _pairing_server, [client.hello()]),
        Target("pairing_answer", _pairing_client, [_pairing_answer()]),
        Target("certificate", identity.can_be_a_device, [me.certificate_der]),
        Target(
            "mdns_packet", lambda data: DNSIncoming(data).answers(), [service + b"\x00\x0c\x00\x01"]
        ),
        Target(
            "mdns_record",
            of_value(_mdns_record),
            [cbor.dumps([service_name(ME), {"id": ME.encode()}, ["10.0.0.1"], 4000])],
        ),
    ]


def _pairing_server(data: bytes) -> object:
    return pairing.PairingServer(_own_identity(), "pi").hello(data, "12345678")


def _pairing_client(data: bytes) -> object:
    me = _own_identity()
    client = pairing.PairingClient(me, "pi", "12345678", me.certificate_der)
    client.hello()
    return client.confirm(data)


def _pairing_answer() -> bytes:
    me = _own_identity()
    return pairing.PairingServer(me, "pi").hello(
        pairing.PairingClient(me, "pi", "12345678", me.certificate_der).hello(), "12345678"
    )


def _mdns_record(value: Any) -> object:
    match value:
        case [str(name), dict(properties), [*ips], int(port)]:
            known = {
                key.encode(errors="replace"): item
                for key, item in properties.items()
                if isinstance(item, bytes)
            }
            return parse(name, known, [ip for ip in ips if isinstance(ip, str)], port)
    return None


def _course() -> JobCourse:
    keeper = CourseKeeper("r", "pi", "Net", 9)
    for number in (1, 2):
        keeper.note(events.Step(number, 0.5, 9.0, 0.1, 0.01, (0.01,)), float(number))
    keeper.note(events.Eval(2, {"accuracy": 0.5}), 2.5)
    stage = events.PlanStage((0, 4), (events.PlanDevice("pi", 1),), ("a.weight",))
    left_out = (events.LeftOut("phone", "it is slow"),)
    keeper.note(events.Plan(1, "start", (stage,), 8, 4, 9.0, left_out), 3.0)
    course = keeper.since(CourseAsked(), 4.0)
    return replace(course, earlier=EarlierRuns().with_run("Net", course, 1).of("Net"))


def _picture() -> RoundPicture:
    bars = Bar(0, 0, 0.0, 0.5), Bar(1, 6, 0.5, 2.0)
    return RoundPicture(("pi", "desk"), 2.0, (7, 8), (0.0, 1.0), bars, PredictedRound(1.0, bars))


def _training() -> list[Target]:
    key, line = GenerationKey("j", 3), StreamId(GenerationKey("j", 3), 1, "activations")
    shape = Round(4, RoundMode.TRAIN, 4, 32, 8)
    orders: list[FrameFields] = [
        *(key, MicroBatchKey(3, 1), Commit(3, 2, (0.5, "float32")), EndOfRounds(5)),
        *(RoundOrder(shape, keep=True, stay=(AT,)), RetainSnapshots("j", (AT,))),
        *(
            SnapshotOffer("j", StageCopy(3, 0, 4, AT), 100),
            SnapshotKept("j", StageCopy(3, 0, 4, AT), "no"),
            BackupAssignment("j", StageCopy(3, 0, 4, AT), ME),
        ),
        *(
            line,
            MicroBatchSlice(MicroBatchKey(3, 1), RoundMode.TRAIN, 8, 0, 4),
            ResendLogged(line, 2, 7),
        ),
        *(
            ResendSamples(line, shape),
            JobLine("m", 3, 4, 0.5, 9.0, ("pi",)),
            CourseAsked("r", 2, 40),
            SteerRequest("r", "pause"),
            ProgressCounters(3, 1 << 40, 2.5),
            LinksAsked((ME,), again=True),
        ),
        *(LinksAnswer(((ME, 1e7, 0.001),)), ProfileAsked("j", "m", ME, (1, 4), company=True)),
    ]
    orders += [
        StateRequest(
            *("j", ME, 3, frozenset({ME}), AT),
            rebuild=Rebuild(ME, 1, 0, 4, 3, AT, Version(9, 3)),
        ),
        *(
            PrepareReply(False, 5, "why", ME, MemoryShortage(MemoryBudgets(7, 9), True)),
            FailureReport("not_finite", "why", 3, 1, 2),
        ),
        *(RangeRequest(7, 0, 1, 0, 131072, True), PassedOver("j", ME, 600.0)),
    ]
    parts: list[Blob] = [
        *(assignment(), _course(), _picture(), state_report(), planning_request()),
        *(
            Fetches((Fetch(0, 4, ME), Fetch(4, 5, ME, True))),
            ProfileAnswer(_MEASURED, MemoryBudgets(1 << 30, 1), 5),
        ),
    ]
    ended = FailureReport("link", "a link ended", peer=ME)
    return [
        *(_of_frame(order) for order in orders),
        _of_frame(PlanWish(1, SearchPriority.IDLE)),
        *(_of_part(part) for part in parts),
        Target("link_failure", of_fields(FailureReport.read), [cbor.dumps(ended.fields())]),
        Target("digest", of_value(lambda value: read_digest(value, 100)), [cbor.dumps([5])]),
        Target("tensor_meta", of_value(_tensor_meta), [cbor.dumps(pack(torch.zeros(3, 4)).meta)]),
        Target("model", decode_model, [_model()]),
        Target("box_answer", ProfileResult.from_bytes, [cbor.dumps(write_form(_found()))]),
        *_about_plans(),
    ]


def _found() -> ProfileResult:
    times = TimeTable((4,), (UnitTimes((0.01,), (0.02,), (0.0,)),))
    return ProfileResult(UnitMeasurements(7, 1, (Unit("u", 4, 4, 4, 1),), times, 1.0))


def _about_plans() -> list[Target]:
    """What a holder asks of a plan, and what it is answered."""
    measured: list[Any] = [
        MeasuredDevice(
            name * 64,
            name,
            {**_MEASURED, "units": _MEASURED["units"] * 5},
            MemoryBudgets(1 << 30),
            1 << 20,
        )
        for name in ("a", "b")
    ]
    links = {("a", "b"): ClusterLink(1e7, 0.1), ("b", "a"): ClusterLink(1e7, 0.1)}
    household = MeasuredCluster(tuple(measured), links, "a", frozenset({"b"}))
    near = Near(
        Plan.from_json(_PLAN, "the plan"), Replicas((("a",),) * 2 + (("b",),)), ReplanMethod.LIGHT
    )
    return [
        _of_part(
            PlanQuestion(replace(planning_request(), batch_size=8), household, near),
            PlanQuestion(planning_request(), household),
        ),
    ]


def _of_frame(form: FrameFields) -> Target:
    kind = type(form)
    return Target(kind.__name__, of_fields(kind.read), [cbor.dumps(form.fields())])


def _of_part(*forms: Blob | PlanQuestion) -> Target:
    kind = type(forms[0])
    return Target(kind.__name__, kind.from_bytes, [form.to_bytes() for form in forms])


def _tensor_meta(value: Any) -> object:
    return Unpacking(value, (torch.float32, (3, 4))).buffer.nbytes


def _model() -> bytes:
    from p2ptrain.model.capture.capture import capture

    layer = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
    example = (torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64))
    return capture(layer, torch.nn.functional.cross_entropy, example).description.to_bytes()


GROUPED = OptimizerSpec.of("AdamW", [AdamW(lr=lr).group(0) for lr in (0.1, 0.2)], [0, 1, 0])


def assignment() -> Assignment:
    """Of two stages."""
    first = StageAssignment(0, 3, 2, (ME, "b"), (3, 1), copies_to="c")
    last = StageAssignment(3, 5, 1, ("c",), (1,))
    fields: dict[str, Any] = {
        **{"key": GenerationKey("j", 3), "holder": ME, "digest": "d", "stages": (first, last)},
        **{"batch_size": 8, "micro_batch": 4, "optimizer": GROUPED, "seed": 1},
        **{"clip": False, "version": AT, "lineage": Lineage((Era(1, 0, 0), Era(2, 7, 1)))},
    }
    if "term" in Assignment.__dataclass_fields__:
        fields["term"] = 1
    return Assignment(**fields)


def state_report() -> StateReport:
    """Of everything."""
    entry = StateEntry(0, 4, AT, StateKind.LIVE, Version(8, 2), (0.5, "float32"))
    return StateReport(
        ME,
        3,
        entries=(entry, StateEntry(4, 5, AT, StateKind.REPLICA)),
        linked=frozenset({"b"}),
        memory=MemoryBudgets(1 << 30, 1 << 20),
        speeds=(("b", 1e7, 0.001),),
        measured=_MEASURED,
        logged=ReplayWindow(3, 5),
    )


def planning_request() -> JobPlanRequest:
    """Of a small job."""
    numbers = {"input_bytes": 7, "target_bytes": 1, "batch_size": 16, "micro_batch": 4}
    return JobPlanRequest(
        **{"job": "j", "digest": "d", "model": "m", "planner": "auto", **numbers},  # type: ignore[arg-type]
        optimizer_state_ratio=1.0,
        min_micro_batch=1,
        private_first=0,
        private_last=0,
        optimizer=GROUPED,
        seed=0,
        clip=False,
        first_step=0,
        alone=False,
        sharing=SharingLimits(),
    )


_MEASURED: dict[str, Any] = {
    "units": [
        {"name": "u", "flops": 1, "parameter_bytes": 4, "output_bytes": 4, "activation_bytes": 4}
    ],
    "times": {"1": {"forward": [0.01], "backward": [0.02]}},
}

_PLAN: dict[str, Any] = {
    "format": "p2ptrain.plan/1",
    "planner": "pp",
    "micro_batch": 4,
    "micro_batches": 2,
    "stages": [
        {"units": [0, 2], "devices": [{"name": "a", "share": 4}], "warmup": 2},
        {"units": [2, 3], "devices": [{"name": "b", "share": 4}], "warmup": 1},
    ],
    "predicted": {"round_seconds": 1.0, "samples_per_s": 8.0, "peak_bytes": {"a": 5, "b": 6}},
    "left_out": [{"name": "c", "reason": "slow"}],
    "mode": "sync",
    "mode_reason": "it is faster",
}


def _plans() -> list[Target]:
    cluster = Cluster(
        (ClusterDevice("a", 1 << 30, holder=True), ClusterDevice("b", 1 << 30)),
        links={("a", "b"): ClusterLink(1e7, 0.1)},
        default_link=ClusterLink(1e7, 0.1),
    )
    return [
        Target("plan", of_json(Plan.from_json), [_json(_PLAN)]),
        Target("cluster", of_json(Cluster.from_json), [_json(cluster.to_json())]),
    ]


def _files() -> list[Target]:
    place = LeasedIdentity("pi", 4000, PairingWindow("12345678", 60.0))
    return [
        Target("sealed_file", open_json, [seal_json({"format": "x", "steps": [1, 2.5, None]})]),
        Target(
            "place",
            of_json(lambda value: read_place(value, 0.0)),
            [_json(place_fields(place, 0.0))],
        ),
        Target("device_pem", _in_folder("device.pem", identity.load_or_create), [_pem()]),
        Target("trusted_json", _in_folder("trusted.json", _trust_store), [_trusted()]),
        Target("device_json", _in_folder("device.json", _device_file), [_device()]),
        Target("codes_json", _in_folder("codes.json", _codes), [_read_file(_taken, "codes.json")]),
        Target(
            "addresses_json",
            _in_folder("addresses.json", lambda folder: _device_file(folder).addresses()),
            [seal_json({ME: [["10.0.0.1", 4000]]})],
        ),
        Target(
            "journal",
            _in_folder("job.json", lambda folder: journal.find_journal(folder, lambda _: None)),
            [_journal()],
        ),
        Target("checkpoint_index", _in_checkpoint, [_checkpoint_index()]),
    ]


def _in_folder(name: str, read: Callable[[StateFolder], object]) -> Callable[[bytes], object]:
    """A decoder of a state folder in which one file holds what is decoded."""

    def decode(data: bytes) -> object:
        with tempfile.TemporaryDirectory() as place:
            folder = StateFolder(Path(place) / "state")
            folder.write(name, data)
            return read(folder)

    return decode


@cache
def _checkpoint() -> tempfile.TemporaryDirectory[str]:
    """A folder with a whole one, for as long as the process runs."""
    place = tempfile.TemporaryDirectory()
    progress = checkpoint_files.CheckpointProgress(3, "d", 16, 8, 0, "sgd")
    checkpoint_files.save(
        Path(place.name), checkpoint_files.Checkpoint(progress, {"w": torch.zeros(2)}, {})
    )
    return place


def _checkpoint_index() -> bytes:
    return (Path(_checkpoint().name) / checkpoint_files.INDEX).read_bytes()


def _in_checkpoint(data: bytes) -> object:
    folder = Path(_checkpoint().name)
    (folder / checkpoint_files.INDEX).write_bytes(data)
    return checkpoint_files.load(folder, lambda _warning: None)


def _trust_store(folder: StateFolder) -> object:
    return TrustStore(folder, _own_identity()).book


def _read_file(write: Callable[[StateFolder], object], name: str) -> bytes:
    with tempfile.TemporaryDirectory() as place:
        folder = StateFolder(Path(place) / "state")
        write(folder)
        return (folder.path / name).read_bytes()


def _device_file(folder: StateFolder) -> DeviceRecord:
    return DeviceRecord(folder, None, "pi")


def _device() -> bytes:
    return _read_file(_device_file, "device.json")


def _codes(folder: StateFolder) -> KnownCodes:
    return KnownCodes(folder, ME)


def _taken(folder: StateFolder) -> None:
    codes = _codes(folder)
    codes.take("12345678")
    codes.spend()


def _pem() -> bytes:
    return _read_file(identity.load_or_create, "device.pem")


def _trusted() -> bytes:
    me = _own_identity()
    return _read_file(
        lambda folder: TrustStore(folder, me).add_paired(me.certificate_der, "pi"), "trusted.json"
    )


def _journal() -> bytes:
    fields = {
        **{"format": "p2ptrain.job/2", "job": "j", "fingerprint": "f", "weights": "w"},
        **{"first_step": 0, "next_generation": 3, "lineage": [[1, 0, 0]], "assignment": None},
        **{"plan": None, "stable": [3, 1], "took_part": {ME: 1}},
    }
    return seal_json(fields)
