"""What Ctrl-C says of a training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from p2ptrain.cli import main
from p2ptrain.events import Event, Step

_SCRIPT = """
import p2ptrain, torch

def job():
    return p2ptrain.Job(
        model=torch.nn.Linear(3, 2),
        data=torch.utils.data.TensorDataset(torch.rand(8, 3), torch.rand(8, 2)),
        loss=torch.nn.functional.mse_loss,
        optimizer=p2ptrain.SGD(lr=0.1),
        batch_size=4,
        epochs=600,
    )
"""


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ([], "No weights were saved: use --checkpoint DIR"),
        (["--checkpoint", "kept"], "--resume kept"),
        (["--out", "kept.safetensors"], "of 1,200. Use --checkpoint DIR"),
    ],
    ids=["nothing kept", "checkpoints", "weights"],
)
def test_an_interrupted_training_says_where_it_stopped_and_what_is_kept(
    options: list[str],
    advice: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    async def interrupted(
        job: object, chosen: object, on_event: Callable[[Event], None], *_: object
    ) -> None:
        on_event(Step(step=709, loss=1.0, samples_per_s=1.0, seconds=1.0))
        raise KeyboardInterrupt

    monkeypatch.setattr("p2ptrain.api.train.train_alone", interrupted)
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    assert main.main(["train", str(script), "--local", *options]) == 130
    line = capfd.readouterr().err.splitlines()[-1]
    assert line.startswith("Stopped at step 709 of 1,200. ")
    assert advice in line
