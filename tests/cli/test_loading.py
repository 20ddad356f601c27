"""Progress in a terminal and elsewhere."""

from __future__ import annotations

import io

from ksana.cli.loading import LoadingBar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_in_a_terminal_is_drawn_over_and_ended() -> None:
    stream = Terminal()
    bar = LoadingBar(stream)
    for done in (0, 50, 100):
        bar(done, 100)
    bar.finish()
    bar.finish()
    assert stream.getvalue().count("\r") == 3
    assert stream.getvalue().count("\n") == 1
    assert stream.getvalue().endswith("100%\n")


def test_a_log_gets_a_line_for_each_quarter_and_the_end() -> None:
    stream = io.StringIO()
    bar = LoadingBar(stream)
    for done in range(1001):
        bar(done, 1000)
    bar.finish()
    lines = stream.getvalue().splitlines()
    assert [line.partition("]")[2].split()[0] for line in lines] == ["0%", "25%", "50%", "75%", "100%"]
    assert "\x1b" not in stream.getvalue()


def test_words_between_do_not_mix_with_the_bar() -> None:
    stream = Terminal()
    bar = LoadingBar(stream)
    bar(1, 2)
    bar.say("Fetching")
    assert stream.getvalue().endswith("\nFetching\n")


def test_an_empty_model_is_loaded() -> None:
    stream = io.StringIO()
    LoadingBar(stream)(0, 0)
    assert "100%" in stream.getvalue()
