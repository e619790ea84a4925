"""torchrun for tests: its ranks are forked when the trainer is imported already, which is most of what they would do.

    python forked.py [torchrun's options] forked_rank.py [flags of armillary.train]

The agent that starts, signals, ends and restarts ranks is torchrun's own.
"""

import sys

from launches import run_forking

if __name__ == "__main__":
    run_forking(["--start-method", "fork", "--run-path", *sys.argv[1:]])
