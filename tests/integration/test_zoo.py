"""The tests' own ground: the zoo is deterministic and the reference loop learns on it."""

from __future__ import annotations

import pytest
import torch

from tests.support import reference, zoo

torch.set_num_threads(1)

SGD = reference.Recipe(
    lambda parameters: torch.optim.SGD(parameters, lr=0.05), batch_size=8, micro_batch=3, steps=2
)


def run(name: str, recipe: reference.Recipe = SGD, seed: int = 0) -> reference.Outcome:
    made = zoo.make(name, samples=16, seed=seed)
    return reference.train(made.model, made.data, made.loss, recipe)


@pytest.mark.parametrize("name", [name for name in zoo.OWN if name != "dropout"])
def test_the_same_name_gives_the_same_curve(name: str) -> None:
    first, second = run(name), run(name)
    assert first.losses == second.losses
    assert all(torch.equal(v, second.state_dict[k]) for k, v in first.state_dict.items())
    assert first.losses != run(name, seed=1).losses


@pytest.mark.parametrize("name", zoo.OWN)
def test_every_model_trains_in_float64(name: str) -> None:
    made = zoo.make(name, samples=8, dtype=torch.float64)
    assert len(reference.train(made.model, made.data, made.loss, SGD).losses) == 1
    assert {p.dtype for p in made.model.parameters()} == {torch.float64}


def test_make_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    zoo.make("mlp")
    assert torch.equal(before, torch.get_rng_state())


def test_micro_batches_add_up_to_the_whole_batch() -> None:
    whole = reference.Recipe(lambda p: torch.optim.SGD(p, lr=0.05), batch_size=8, steps=2)
    expected = run("mlp", whole)
    split = run("mlp")
    assert split.losses == pytest.approx(expected.losses, rel=1e-5)


def test_epochs_end_training() -> None:
    recipe = reference.Recipe(lambda p: torch.optim.SGD(p, lr=0.05), batch_size=7, epochs=3)
    assert len(run("mlp", recipe).losses) == 6


def test_frozen_parameters_stay_but_their_norms_statistics_move() -> None:
    before = zoo.make("frozen").model.state_dict()
    after = run("frozen").state_dict
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert {name for name in changed if name.startswith("backbone.")} == {
        "backbone.1.running_mean",
        "backbone.1.running_var",
        "backbone.1.num_batches_tracked",
    }
