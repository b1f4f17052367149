"""Training scripts: what is wrong with them is said with the user's own file and line."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from p2ptrain.cli.script import load_job
from p2ptrain.cli.usage import UsageError
from p2ptrain.errors import ScriptError, UserError

GOOD = """
import p2ptrain, torch

def job(hidden: int = 4):
    model = torch.nn.Linear(hidden, 2)
    data = [(torch.zeros(hidden), 0)] * 8
    loss = torch.nn.functional.cross_entropy
    return p2ptrain.Job(model=model, data=data, loss=loss, optimizer=p2ptrain.SGD(lr=0.1),
                        batch_size=4)
"""


@pytest.fixture(autouse=True)
def _own_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("p2ptrain_script", None)


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        path = tmp_path / "script.py"
        path.write_text(text)
        return str(path)

    return write


def test_a_good_script_gives_its_job(script: Callable[[str], str]) -> None:
    job = load_job(script(GOOD), [("hidden", "6")])
    assert job.batch_size == 4
    assert tuple(job.model.weight.shape) == (2, 6)  # type: ignore[arg-type]


def test_a_script_may_import_its_neighbours(script: Callable[[str], str], tmp_path: Path) -> None:
    (tmp_path / "p2ptrain_test_neighbour.py").write_text("WIDTH = 3\n")
    text = GOOD.replace("import p2ptrain,", "import p2ptrain_test_neighbour, p2ptrain,")
    assert load_job(script(text), []).batch_size == 4


def test_a_missing_script_is_named(tmp_path: Path) -> None:
    with pytest.raises(ScriptError, match=r"gone\.py does not exist"):
        load_job(str(tmp_path / "gone.py"), [])


def test_a_home_of_an_unknown_user_holds_no_script() -> None:
    with pytest.raises(ScriptError, match=r"~no-such-user/x\.py does not exist"):
        load_job("~no-such-user/x.py", [])


@pytest.mark.parametrize("base", ["BaseException", "GeneratorExit"])
def test_what_is_no_exception_is_the_script_s_failure_too(
    script: Callable[[str], str], base: str
) -> None:
    text = f"class Panic({base}): ...\ndef job():\n    raise Panic('odd')\n"
    with pytest.raises(ScriptError, match=r"script\.py, line 3, in job: .*: Panic: odd"):
        load_job(script(text), [])


def test_a_script_has_words_of_its_own_for_its_user(script: Callable[[str], str]) -> None:
    text = "import p2ptrain\ndef job():\n    raise p2ptrain.UserError('no pictures yet')\n"
    with pytest.raises(UserError, match=r"^no pictures yet$"):
        load_job(script(text), [])


def test_an_interrupt_is_none(script: Callable[[str], str]) -> None:
    with pytest.raises(KeyboardInterrupt):
        load_job(script("def job():\n    raise KeyboardInterrupt\n"), [])


def test_a_folder_is_no_script(tmp_path: Path) -> None:
    with pytest.raises(ScriptError, match="is a folder"):
        load_job(str(tmp_path), [])


def test_a_syntax_error_names_the_line(script: Callable[[str], str]) -> None:
    with pytest.raises(ScriptError, match=r"script\.py, line 2: .*: def job\(:"):
        load_job(script("import math\ndef job(:\n"), [])


def test_a_script_without_a_job_says_so(script: Callable[[str], str]) -> None:
    with pytest.raises(ScriptError, match=r"defines no job\(\)"):
        load_job(script("x = 1\n"), [])


@pytest.mark.parametrize(("value", "kind"), [("3", "int"), ("list", "type")])
def test_job_must_be_a_function(script: Callable[[str], str], value: str, kind: str) -> None:
    with pytest.raises(ScriptError, match=f"must be a function, not {kind}"):
        load_job(script(f"job = {value}\n"), [])


def test_job_must_return_a_job(script: Callable[[str], str]) -> None:
    with pytest.raises(ScriptError, match=r"must return a p2ptrain\.Job, not None"):
        load_job(script("def job():\n    pass\n"), [])


def test_an_exception_names_the_user_s_own_line(script: Callable[[str], str]) -> None:
    text = "import json\ndef job():\n    return json.loads('{')\n"
    with pytest.raises(ScriptError) as caught:
        load_job(script(text), [])
    assert re.search(
        r"script\.py, line 3, in job: return json\.loads\('\{'\): JSONDecodeError",
        str(caught.value),
    )


def test_a_wrong_field_of_the_job_names_the_line_too(script: Callable[[str], str]) -> None:
    with pytest.raises(ScriptError, match=r"line 8, in job: .*batch_size must be at least 1"):
        load_job(script(GOOD.replace("batch_size=4", "batch_size=0")), [])


def test_a_missing_library_says_where_it_is_needed(script: Callable[[str], str]) -> None:
    with pytest.raises(ScriptError, match=r"line 1: import surely_missing.*install it on this"):
        load_job(script("import surely_missing\n"), [])


def test_a_script_that_ends_itself_is_an_error(script: Callable[[str], str]) -> None:
    with pytest.raises(ScriptError, match=r"line 2: .*the script ended itself \(exit code 3\)"):
        load_job(script("import sys\nsys.exit(3)\n"), [])


def test_a_script_that_reads_the_command_line_sees_no_arguments(
    script: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["p2ptrain", "train", "x.py"])
    parse = (
        "import argparse\np = argparse.ArgumentParser()\np.add_argument('{}'{})\np.parse_args()\n"
    )
    load_job(script(parse.format("--lr", ", default=0.1") + GOOD), [])
    with pytest.raises(ScriptError, match=r"exit code 2\)\. .* give them as -o KEY=VALUE"):
        load_job(script(parse.format("file", "")), [])
    assert sys.argv == ["p2ptrain", "train", "x.py"]


def test_wrong_settings_are_wrong_usage_not_a_wrong_script(script: Callable[[str], str]) -> None:
    with pytest.raises(UsageError, match="it takes hidden"):
        load_job(script(GOOD), [("width", "3")])


def test_main_is_not_run(script: Callable[[str], str]) -> None:
    load_job(script(GOOD + "\nif __name__ == '__main__':\n    raise SystemExit(9)\n"), [])


def test_a_script_knows_where_it_is(script: Callable[[str], str]) -> None:
    path = script(f"{GOOD}\nfrom pathlib import Path\nhere = Path(__file__).resolve()\n")
    load_job(path, [])
    module = sys.modules["p2ptrain_script"]
    assert module.here == Path(path).resolve()
