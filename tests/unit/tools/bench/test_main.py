"""What the command line refuses before it measures for hours."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.bench.__main__ import main


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--repeat", "0"), "--repeat, --rounds and --settle are at least 1"),
        (("--rounds", "0"), "--repeat, --rounds and --settle are at least 1"),
        (("--limit", "nan"), "--limit is above 0"),
        (("--limit", "-1"), "--limit is above 0"),
        (("--train", '"--micro-batch 64'), "--train: No closing quotation"),
        (("--report", "nowhere/bench.md"), "there is no folder nowhere for bench.md"),
        (("--only", "A/vit/S/horovod"), "there is no system 'horovod'"),
    ],
    ids=str,
)
def test_wrong_usage_is_said_and_ends_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], words: str
) -> None:
    file = tmp_path / "bench.json"
    with pytest.raises(SystemExit) as ended:
        main(["--out", str(file), *options])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err
    assert not file.exists()
