"""What `--out` and `--gantt` name is written to, whatever it is, and nothing beside it is lost."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest

from p2ptrain.errors import OptionError
from p2ptrain.job.planning_files import write_whole

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="links and pipes")


def test_a_pipe_is_written_to_and_stays_one(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_whole(pipe, "{}")
        assert os.read(reader, 100) == b"{}\n"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_descriptor_s_name_can_be_written_to() -> None:
    """As bash gives it for `--out >(jq .)`."""
    reader, writer = os.pipe()
    try:
        write_whole(Path(f"/dev/fd/{writer}"), "{}")
        assert os.read(reader, 100) == b"{}\n"
    finally:
        os.close(reader)
        os.close(writer)


def test_a_link_is_followed(tmp_path: Path) -> None:
    link, file = tmp_path / "link.json", tmp_path / "elsewhere" / "plan.json"
    file.parent.mkdir()
    link.symlink_to(file)
    for text in ("first", "second"):  # a file that is not there yet, and one that is
        write_whole(link, text)
        assert link.is_symlink()
        assert file.read_text() == f"{text}\n"
    assert [path.name for path in file.parent.iterdir()] == ["plan.json"]


def test_what_is_in_the_way_is_reported_for_the_file_that_was_named(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(OptionError, match=r"/folder: cannot be written: Is a directory$"):
        write_whole(tmp_path / "folder", "{}")
    with pytest.raises(OptionError, match=r"/gone/p\.json: cannot be written: No such file"):
        write_whole(tmp_path / "gone" / "p.json", "{}")
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OptionError, match=r"/a: cannot be written: .*[Ll]oop|symbolic links"):
        write_whole(tmp_path / "a", "{}")
