"""Runs one contender's cases in this process's environment, and prints each outcome as a line of JSON.

python benchmarks/scoreboard/trial.py NAME CASE ...
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from importlib import metadata
from multiprocessing import forkserver

from contender import Contender, contenders
from outcome import run
from setting import Setting


def versions(cls: type[Contender]) -> dict[str, str]:
    """Installed versions of the contender's requirements."""
    names = [requirement.partition("==")[0] for requirement in (*cls.requirements, *cls.alone)]
    return {name: metadata.version(name) for name in names or ["torch"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("cases", nargs="*", type=Setting.read, metavar="CASE")
    options = parser.parse_args()
    cls = contenders()[options.name]
    # The fork server imports only the modules of this contender; World's default has other ones.
    forkserver.set_forkserver_preload(["torch.distributed.tensor", "outcome", *cls.modules])
    forkserver.ensure_running()
    print(json.dumps({"versions": versions(cls)}), flush=True)
    for outcome in run(cls, options.cases):
        print(json.dumps(asdict(outcome)), flush=True)


if __name__ == "__main__":
    sys.exit(main())
