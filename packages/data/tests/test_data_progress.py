"""The progress bar: on stderr, and only on a terminal."""

import io
import sys

import pytest

from armillary.data.console import Bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def work(**options: bool) -> None:
    with Bar("counting", **options) as bar:
        for step in range(1, 21):
            bar.show("counting sheep", step, 20)
            bar.refresh()
        print("[not markup]")


@pytest.mark.parametrize("options", [{}, {"quiet": True}, {"quiet": True, "lines": True}])
def test_without_a_terminal_nothing_is_shown(options, capsys):
    work(**options)
    assert capsys.readouterr() == ("[not markup]\n", "")


def test_log_gets_few_lines(capsys):
    work(lines=True)
    messages = capsys.readouterr().err.splitlines()
    assert len(messages) == 10 and messages[-1] == "counting sheep: 100% of 20 bytes"


def test_a_terminal_gets_a_bar_on_stderr(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    work()
    assert "counting sheep" in sys.stderr.getvalue() and "20/20" in sys.stderr.getvalue()
    assert capsys.readouterr().out == "[not markup]\n"
    monkeypatch.setattr(sys, "stderr", Terminal())
    work(quiet=True)
    assert sys.stderr.getvalue() == ""
