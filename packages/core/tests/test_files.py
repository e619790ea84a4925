"""Files that appear whole, or not at all."""

from pathlib import Path

import pytest

from armillary.core.files import write_whole


def test_what_was_there_stays_until_what_replaces_it_is_complete(tmp_path):
    path = tmp_path / "config.json"
    assert write_whole(path, lambda partial: partial.write_text("one")) == path

    def fails(partial: Path) -> None:
        partial.write_text("tw")
        assert path.read_text() == "one"
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        write_whole(path, fails)
    assert path.read_text() == "one"
    write_whole(path, lambda partial: partial.write_text("two"))
    assert path.read_text() == "two" and list(tmp_path.iterdir()) == [path]
