"""The Dockerfile, held against the rules of its format and against what it copies and starts."""

from __future__ import annotations

import fnmatch
import json
import re
import subprocess
from pathlib import Path

from p2ptrain.cli.main import build_parser
from p2ptrain.mesh.identity.state_folder import STATE_DIR_VARIABLE

ROOT = Path(__file__).parents[2]
LINES = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text(encoding="utf-8")).splitlines()
STEPS = [line.split(None, 1) for line in LINES if line.strip() and not line.startswith("#")]
LAST_IMAGE = STEPS[max(n for n, (word, _) in enumerate(STEPS) if word == "FROM") :]


def test_it_copies_what_is_there_and_not_ignored() -> None:
    copied = [text.split()[:-1] for word, text in STEPS if word == "COPY"]
    sources = [s for words in copied for s in words if not words[0].startswith("--")]
    rules = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert rules[0] == "*"
    assert sources
    for source in sources:
        assert (ROOT / source).exists()
        assert any(fnmatch.fnmatch(source, rule[1:]) for rule in rules if rule.startswith("!"))


def test_its_images_are_pinned_and_its_shell_lines_are_shell() -> None:
    images = [text.split()[0] for word, text in STEPS if word == "FROM"]
    assert all(re.fullmatch(r"[\w./-]+:\d[\w.-]*", image) for image in images)
    for word, text in STEPS:
        if word == "RUN":
            subprocess.run(["sh", "-n", "-c", text], check=True)


def test_it_starts_a_member_that_is_no_root_and_keeps_its_state() -> None:
    said = dict(LAST_IMAGE)
    command = [*json.loads(said["ENTRYPOINT"]), *json.loads(said["CMD"])]
    assert command[0] == "p2ptrain"
    assert build_parser().parse_args(command[1:])
    (user,) = [text for word, text in LAST_IMAGE if word == "USER"]
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user)
    assert f"{STATE_DIR_VARIABLE}={said['VOLUME']}" in said["ENV"].split()
    assert said["STOPSIGNAL"] == "SIGTERM"
