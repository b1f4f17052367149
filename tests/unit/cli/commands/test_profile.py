"""`profile` writes a file that planning reads, as a whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from p2ptrain.api import device_services
from p2ptrain.cli import main
from p2ptrain.devices.selection import ChosenDevice
from p2ptrain.job.planning_files import write_whole
from p2ptrain.plan.types.profile import Profile
from p2ptrain.profiling import measure_units as measure
from p2ptrain.profiling.measure_units import UnitMeasurements, measure_units
from tests.support.twin_device import TwinDevice


def test_a_model_is_measured_into_a_profile_file(
    script: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "profile.json"
    argv = ["profile", script, "--out", str(out), "--batch-sizes", "4,2", "-o", "hidden=6"]
    assert main.main([*argv, "--json"]) == 0
    profile = Profile.from_json(json.loads(out.read_text()))
    assert profile.times.sizes == (2, 4)
    assert profile.input_bytes == 6 * 4
    assert sum(unit.parameter_bytes for unit in profile.units) == (6 * 2 + 2) * 4
    assert json.loads(capfd.readouterr().out)["units"] == len(profile.units)


def test_an_accelerator_is_measured_where_it_is_asked_for(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    twin, asked = TwinDevice(), []

    async def chosen(request: object, *_: object, **__: object) -> ChosenDevice:
        asked.append(str(request))
        return ChosenDevice(twin)

    monkeypatch.setattr(device_services, "choose_device", chosen)
    argv = ["profile", script, "--out", str(tmp_path / "p.json"), "--batch-sizes", "2"]
    assert main.main([*argv, "--device", "cuda:1"]) == 0
    assert asked == ["cuda:1"]
    assert "aten.addmm.default" in twin.call_names
    assert Profile.from_json(json.loads((tmp_path / "p.json").read_text())).times.sizes == (2,)


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this processor cannot flush")
def test_denormals_are_zero_while_units_are_timed_and_only_then(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def faint() -> float:
        return float((torch.full((8,), torch.finfo(torch.float32).tiny) * 0.5).sum())

    found: list[float] = []

    def noting(*args: Any, **kwargs: Any) -> UnitMeasurements:
        found.append(faint())
        return measure_units(*args, **kwargs)

    monkeypatch.setattr(measure, "measure_units", noting)
    argv = ["profile", script, "--out", str(tmp_path / "p.json"), "--batch-sizes", "2"]
    assert main.main(argv) == 0
    assert found == [0.0]
    assert faint() > 0


def test_the_file_is_written_where_the_command_began(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    Path(script).write_text(f"import os; os.chdir('elsewhere')\n{Path(script).read_text()}")
    assert main.main(["profile", script, "--out", "p.json", "--batch-sizes", "2"]) == 0
    assert (tmp_path / "p.json").exists()


def test_a_missing_folder_is_wrong_usage(script: str, tmp_path: Path) -> None:
    assert main.main(["profile", script, "--out", str(tmp_path / "no" / "p.json")]) == 2


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    out = tmp_path / "p.json"
    out.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        write_whole(out, "\ud800")
    assert out.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["p.json"]


def test_units_that_can_be_cut_into_tiles_say_their_windows(tmp_path: Path) -> None:
    """A convolution and a pooling as one window; planner tiles plans with what the file says."""
    script, out = tmp_path / "job.py", tmp_path / "profile.json"
    script.write_text(
        "import torch\nimport p2ptrain\n"
        "nn = torch.nn\n"
        "def job():\n"
        "    body = [nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]\n"
        "    head = [nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 2)]\n"
        "    data = torch.utils.data.TensorDataset(\n"
        "        torch.zeros(8, 1, 16, 16), torch.zeros(8, dtype=torch.long)\n"
        "    )\n"
        "    return p2ptrain.Job(nn.Sequential(*body, *head), data, nn.functional.cross_entropy,\n"
        "                        optimizer=p2ptrain.SGD(lr=0.1), batch_size=4)\n"
    )
    argv = ["profile", str(script), "--out", str(out), "--batch-sizes", "2"]
    assert main.main(argv) == 0
    profile = Profile.from_json(json.loads(out.read_text()))
    first, *others = (unit.spatial for unit in profile.units)
    assert first is not None
    assert (first.kernel, first.stride, first.padding) == ((4, 4), (2, 2), (1, 1))
    assert (first.height, first.width) == (16, 16)
    assert others[-1] is None
