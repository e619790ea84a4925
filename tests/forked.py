"""torchrun for tests: it forks its ranks after importing the trainer, which would take most of each rank's time.

    python forked.py [torchrun's options] forked_rank.py [flags of armillary.train]

The agent that starts, signals, ends and restarts ranks is torchrun's own.
"""

import sys

from launches import run_forking

if __name__ == "__main__":
    run_forking(["--start-method", "fork", "--run-path", *sys.argv[1:]])
