"""S11, S14, S23: nothing that is received runs as code, or grows beyond what is expected."""

from __future__ import annotations

import ast
import random
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import cbor2
import lz4.block
import pytest

import p2ptrain
from p2ptrain.errors import ProtocolError
from p2ptrain.model.graph.decoding import decode_model
from p2ptrain.net.frame import decode_block
from tools.fuzz_targets import OWN_ERRORS, mutated, targets

FORBIDDEN_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
OWN_PROCESS = {"process/child_process.py", "process/child_process_main.py"}
"""They pickle for a process that the device starts itself, of what it has checked."""
WATCHED = {
    *("pickle.find_class", "exec", "compile", "os.system", "subprocess.Popen", "os.exec"),
    *("os.fork", "os.posix_spawn", "ctypes.dlopen", "socket.connect", "marshal.loads"),
}
WRITES = {
    *("device_pem", "trusted_json", "journal", "checkpoint_index"),
    *("device_json", "codes_json", "addresses_json"),
}
"""Targets that put what they read into a file first."""


def _faults(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import(names=names):
                found += [n.name for n in names if n.name.split(".")[0] in FORBIDDEN_MODULES]
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in FORBIDDEN_MODULES:
                found.append(module)
            case ast.Call(func=ast.Name(id=name)) if name in FORBIDDEN_CALLS:
                found.append(name)
            case ast.Attribute(value=ast.Name(id="torch"), attr="load"):
                found.append("torch.load")
            case ast.keyword(arg="allow_pickle" | "weights_only"):
                found.append("allow_pickle")
    return found


def test_s11_the_package_holds_nothing_that_makes_code_of_data() -> None:
    """S11: read from the source, so that a new use fails here."""
    root = Path(p2ptrain.__file__).parent
    files = {str(path.relative_to(root)): path for path in root.rglob("*.py")}
    found = {name: faults for name, path in files.items() if (faults := _faults(path))}
    assert found.keys() == OWN_PROCESS
    assert all(fault == "pickle" for faults in found.values() for fault in faults)


def test_s11_nothing_received_runs_writes_or_connects() -> None:
    """S11: what the interpreter itself reports while damaged input is decoded."""
    seen: list[str] = []
    watching = False

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if watching and (event in WATCHED or (event == "open" and "w" in str(args[1]))):
            seen.append(f"{event} {args}"[:200])

    sys.addaudithook(hook)
    dice = random.Random(11)
    for target in targets().values():
        if target.name in WRITES:
            continue
        for example in target.examples:  # what is imported late is imported now
            target.decode(example)
        for _ in range(20):
            data = mutated(dice.choice(target.examples), dice)
            watching = True
            try:
                target.decode(data)
            except OWN_ERRORS:
                pass
            finally:
                watching = False
    assert seen == []


@pytest.mark.parametrize("claimed", [0, 1, 4095, 4097, 1 << 20])
def test_s14_a_block_unpacks_to_what_is_expected_and_to_nothing_else(claimed: int) -> None:
    """S14: the size is the receiver's own; a bomb does not grow first."""
    bomb = memoryview(lz4.block.compress(bytes(64 << 20), store_size=False))
    right = memoryview(lz4.block.compress(bytes(4096), store_size=False))
    raw = memoryview(bytearray(claimed))
    tracemalloc.start()
    try:
        for packed in (bomb, right, memoryview(bytes(right)[:-1])):
            with pytest.raises(ProtocolError):
                decode_block(packed, raw)
        assert tracemalloc.get_traced_memory()[1] < claimed + (1 << 20)
    finally:
        tracemalloc.stop()


def _description() -> dict[str, Any]:
    fields: dict[str, Any] = cbor2.loads(targets()["model"].examples[0])
    return fields


def _with_operator(name: object) -> dict[str, Any]:
    fields = _description()
    node = fields["train"]["nodes"][0]
    node[1] = name
    return fields


@pytest.mark.parametrize(
    "fields",
    [
        *(_with_operator(name) for name in ("os.system", "builtins.eval", "aten.nope.default", 7)),
        {**_description(), "units": _description()["units"] * 2000},
        {**_description(), "tensors": [["w", "parameter", "float32", [2**40] * 3, [1] * 3, True]]},
    ],
    ids=["system", "eval", "unknown", "number", "layers", "huge"],
)
def test_s23_a_model_of_unknown_or_endless_parts_is_refused(fields: dict[str, Any]) -> None:
    """S23: operators from an allow-list, sizes before memory, and no code."""
    with pytest.raises(ProtocolError):
        decode_model(cbor2.dumps(fields))


def test_s23_code_beside_a_model_is_nothing_that_anybody_reads() -> None:
    """S23: it is left out of what is run, sent on and kept."""
    plain = decode_model(targets()["model"].examples[0])
    assert decode_model(cbor2.dumps({**_description(), "code": "1/0"})) == plain
