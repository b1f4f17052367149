"""A notebook in a real kernel: training shows itself, live, and can be stopped."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat", reason="NOT TESTED: nbclient and ipykernel are missing")
pytest.importorskip("ipykernel", reason="NOT TESTED: nbclient and ipykernel are missing")
nbclient = pytest.importorskip("nbclient", reason="NOT TESTED: nbclient and ipykernel are missing")

_JOB = """
import time, torch, p2ptrain
class Slow(torch.utils.data.Dataset):
    def __len__(self): return 4000
    def __getitem__(self, i):
        time.sleep(0.002)
        return torch.ones(4), torch.ones(1)
def job():
    return p2ptrain.Job(model=torch.nn.Linear(4, 1), data=Slow(), batch_size=8,
        loss=torch.nn.functional.mse_loss, optimizer=p2ptrain.SGD(lr=0.1), epochs=1, seed=0)
"""

_BLOCKING = "model = p2ptrain.train(job(), local=True, steps=20, state_dir={state!r}); 'trained'"

_AWAITED = """
async with p2ptrain.Node(state_dir={state!r}, interfaces=["127.0.0.1"]) as node:
    run = await node.train(job())
    display(run)
    async for event in run.events():
        if event.event == "step" and event.step == 20:
            break
    plan = run.plan
    run.stop()
    try:
        await run.result()
    except p2ptrain.RunCancelled as error:
        print(error)
    await asyncio.sleep(1.5)
"""


def _html(cell: Any) -> list[str]:
    return [o["data"]["text/html"] for o in cell.outputs if "text/html" in o.get("data", {})]


def test_training_shows_itself_and_is_stopped(tmp_path: Path) -> None:
    state = str(tmp_path)
    sources = [
        f"import asyncio\n{_JOB}",
        _BLOCKING.format(state=state),
        _AWAITED.format(state=state),
        "plan",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(s) for s in sources])
    client = nbclient.NotebookClient(notebook, timeout=100, kernel_name="python3")
    asyncio.run(client.async_execute())
    _, blocking, awaited, plan = notebook.cells
    assert blocking.outputs[-1]["data"]["text/plain"] == "'trained'"
    (trained,) = _html(blocking)
    assert "Done: Linear, 20 steps" in trained
    assert "<polyline" in trained
    (stopped,) = _html(awaited)  # the same display, drawn again
    assert "Training Linear was stopped at step" in stopped
    assert "the training was cancelled" in awaited.outputs[-1]["text"]
    assert "plan 1 (start)" in _html(plan)[0]
