"""A file takes the place of another, also where that is open for a moment."""

from __future__ import annotations

from pathlib import Path

import pytest

from p2ptrain.files import replace_file, where_links_lead


class _Open:
    """Refuses to be replaced `times` times, as an open file on Windows."""

    def __init__(self, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = times
        self._replace = Path.replace
        monkeypatch.setattr(Path, "replace", lambda new, old: self.replace(new, old))

    def replace(self, new: Path, old: Path) -> Path:
        self.left -= 1
        if self.left >= 0:
            raise PermissionError(13, "Access is denied")
        return self._replace(new, old)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    new, old = tmp_path / "new", tmp_path / "old"
    new.write_text("new")
    old.write_text("old")
    return new, old


def test_an_open_file_is_replaced_once_it_is_closed(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    new, old = files
    _Open(2, monkeypatch)
    replace_file(new, old, patience_seconds=60.0)
    assert old.read_text() == "new"
    assert not new.exists()


def test_a_file_that_stays_open_is_an_error_and_stays_as_it_is(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    new, old = files
    _Open(10**9, monkeypatch)
    with pytest.raises(PermissionError):
        replace_file(new, old, patience_seconds=0.03)
    assert old.read_text() == "old"


def test_links_are_followed_unless_they_lead_to_each_other(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert where_links_lead(tmp_path / "link") == tmp_path.resolve() / "file"
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(OSError, match="symbolic links"):
        where_links_lead(tmp_path / "a")
