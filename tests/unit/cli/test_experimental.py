"""What `--help` hides and `--help-all` shows."""

from __future__ import annotations

import pytest

from p2ptrain.cli import main

HIDDEN = {
    "train": (
        *("--recovery", "--whole-copies", "--vertical-sync", "--aggregate", "--versions"),
        *("--no-stashing", "--repartition", "--replicate"),
    ),
    "plan": ("--overlap", "--schedule", "--straight"),
}


def _help(command: str, option: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as end:
        main.main([command, option])
    assert end.value.code in (None, 0)
    return capsys.readouterr().out


@pytest.mark.parametrize("command", HIDDEN)
def test_help_shows_experimental_options_only_when_asked(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    usual = _help(command, "--help", capsys)
    assert "experimental:" not in usual
    assert "--help-all" in usual
    assert not [option for option in HIDDEN[command] if option in usual]
    for everything in ("--help-all", "-hh"):
        shown = _help(command, everything, capsys)
        section = shown[shown.index("experimental:") :]
        assert not [option for option in HIDDEN[command] if f"\n  {option}" not in section]
