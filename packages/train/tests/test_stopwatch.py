"""Step durations, measured with a fake clock."""

from armillary.train.runtime.stopwatch import Stopwatch


def test_the_stopwatch_excludes_pauses():
    times = iter([10.0, 100.0, 101.0, 102.0])
    watch = Stopwatch(clock=lambda: next(times))
    with watch.pause():
        pass
    watch.count(100)
    watch.count(50)
    assert (watch.tokens, watch.seconds, watch.last_seconds) == (150, 2.0, 1.0)
