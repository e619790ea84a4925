"""Reading of regular files only, and atomic writes."""

import errno
import os
import socket
from pathlib import Path

import pytest

from armillary.core.internal import file_size, is_file_name, open_file, read_file, write_whole, writing


def test_only_regular_files_are_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "endless").symlink_to("/dev/zero")
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        for name in ("pipe", "endless", "folder", "loop", "socket", "absent"):
            for read in (open_file, file_size, read_file):
                with pytest.raises(OSError) as error:
                    read(tmp_path / name)
                assert error.value.filename == str(tmp_path / name) and error.value.strerror


def test_links_to_regular_files_are_read_up_to_a_limit(tmp_path):
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert read_file(tmp_path / "link") == read_file(tmp_path / "link", 5) == b"12345"
    assert file_size(tmp_path / "link") == 5
    with pytest.raises(OSError, match="5 bytes, and at most 4"):
        read_file(tmp_path / "link", 4)
    os.truncate(tmp_path / "file", 2**40)
    with pytest.raises(OSError, match=f"{2**40:,} bytes"):
        read_file(tmp_path / "file")


def test_file_stays_until_its_replacement_is_complete(tmp_path):
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


def test_full_disk_names_the_file_and_other_errors_are_unchanged(tmp_path):
    full = tmp_path / "full.json"
    full.symlink_to("/dev/full")
    with pytest.raises(OSError) as error, writing(full):
        full.write_text("text")
    assert (error.value.filename, error.value.errno) == (str(full), errno.ENOSPC)
    path = tmp_path / "whole.json"
    path.with_name("whole.json.partial").symlink_to("/dev/full")
    with pytest.raises(OSError) as error:
        write_whole(path, lambda partial: partial.write_text("text"))
    assert (error.value.filename, error.value.errno) == (str(path), errno.ENOSPC)
    with pytest.raises(OSError) as error, writing(path):
        (tmp_path / "absent").read_text()
    assert error.value.filename == str(tmp_path / "absent")
    with pytest.raises(OSError) as error, writing(path):
        raise OSError("no number")
    assert str(error.value) == "no number"


def test_file_names_are_distinguished_from_paths():
    assert all(map(is_file_name, ["a", ".metadata", "a..b", "...", "a b", "é"]))
    assert not any(map(is_file_name, ["", ".", "..", "a/b", "/a", "a/", "../a", "a\0", None, 3, b"a", ["a"]]))
