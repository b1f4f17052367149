"""A job's weights from files: of models on "meta", with tied tensors, in several files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from p2ptrain.errors import OptionError, ScriptError
from p2ptrain.job.given_weights import check_weights, load_weights


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(5, 3), nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


def made() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model, and what a file of it has: a tied tensor once."""
    torch.manual_seed(1)
    model = Tied()
    state = model.state_dict()
    return model, {name: tensor for name, tensor in state.items() if name != "head.weight"}


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return Tied()


def test_a_file_gives_a_model_on_meta_its_values_and_keeps_its_tensors(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    full, state = made()
    save_file(state, file)
    model = on_meta()
    model.embed.weight.requires_grad_(False)
    before = dict(model.named_parameters())
    assert check_weights(model, str(file)) == file
    load_weights(model, file)
    assert model.head.weight is model.embed.weight
    assert all(before[name] is tensor for name, tensor in model.named_parameters())
    assert not model.embed.weight.requires_grad
    for name, tensor in full.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


@pytest.mark.parametrize("indexed", [True, False])
def test_a_folder_gives_what_its_index_says(tmp_path: Path, indexed: bool) -> None:
    full, state = made()
    names = sorted(state)
    parts = {"a.safetensors": names[:2], "b.safetensors": names[2:]}
    if not indexed:
        parts = {"model.safetensors": names}
    for file, part in parts.items():
        save_file({name: state[name] for name in part}, tmp_path / file)
    if indexed:
        where = {name: file for file, part in parts.items() for name in part}
        index = {"metadata": {"total_size": 1}, "weight_map": where}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    model = on_meta()
    check_weights(model, tmp_path)
    load_weights(model, tmp_path)
    assert all(torch.equal(model.state_dict()[n], t) for n, t in full.state_dict().items())


def test_what_the_file_does_not_have_keeps_its_value(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    model, state = made()
    save_file({"embed.weight": state["embed.weight"] + 1}, file)
    check_weights(model, file)
    load_weights(model, file)
    assert torch.equal(model.head.weight, state["embed.weight"])  # the same tensor, and now greater
    assert torch.equal(model.norm.weight, torch.ones(3))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state.pop("norm.running_mean"), "no 'norm.running_mean'.*meta device"),
        (lambda state: state.update(other=torch.ones(1)), "has 'other', which the model does not"),
        (lambda state: state.update({"norm.bias": torch.ones(4)}), r"shape \[4\] in .*\[3\] in"),
    ],
)
def test_files_of_other_models_are_refused(tmp_path: Path, change: Any, words: str) -> None:
    file = tmp_path / "model.safetensors"
    _, state = made()
    change(state)
    save_file(state, file)
    with pytest.raises(ScriptError, match=words):
        check_weights(on_meta(), file)


def test_a_model_on_meta_needs_a_file() -> None:
    with pytest.raises(ScriptError, match=r"on the meta device.*weights="):
        check_weights(on_meta(), None)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("none.safetensors", None, "cannot be read"),
        ("text.safetensors", b"no tensors", "cannot be read"),
        ("folder/nothing", b"", "one \\*.safetensors.index.json, or one"),
        ("folder/a.safetensors.index.json", b"{}", "no index of weights"),
        ("folder/a.safetensors.index.json", b'{"weight_map": {"a": "../b"}}', "stand beside it"),
        ("folder/a.safetensors.index.json", b'{"weight_map": ["a"]}', "no index of weights"),
    ],
)
def test_files_that_are_none_are_refused(
    tmp_path: Path, name: str, content: bytes | None, words: str
) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(OptionError, match=words):
        check_weights(Tied(), file.parent if "folder" in name else file)


def test_what_is_no_path_is_refused() -> None:
    with pytest.raises(OptionError, match="must be a file or folder, not dict"):
        check_weights(Tied(), {})
