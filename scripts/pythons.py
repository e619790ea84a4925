"""Checks that a checkpoint written by any Python of this machine is readable by every other.

Uses the running Python, and those of the classifiers that are on PATH or installed by uv or pyenv. Each of the latter
has a temporary environment with the dependencies of armillary-train from uv's cache; a new minor version downloads
torch (0.5 GB). Exits with 1 if a checkpoint was not read correctly, or after 540 s.

    uv run python scripts/pythons.py
"""

from __future__ import annotations

import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
TIMEOUT = 540
CLASSIFIER = re.compile(r"Programming Language :: Python :: (3\.\d+)")


def interpreters() -> dict[str, Path]:
    """Returns an interpreter for each installed version of the classifiers, e.g. 3.11.2."""
    project = tomllib.loads((ROOT / "packages/core/pyproject.toml").read_text())["project"]
    minors = [match[1] for text in project["classifiers"] if (match := CLASSIFIER.fullmatch(text))]
    folders = [Path(folder) for folder in os.get_exec_path()]
    uv = subprocess.run(["uv", "python", "dir"], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    pyenv = os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv"
    folders += [*Path(uv).glob("cpython-*/bin"), *Path(pyenv, "versions").glob("*/bin")]
    query = "import platform; print(platform.python_version())"
    paths: dict[str, Path] = {}
    for path in (folder / f"python{minor}" for minor in minors for folder in folders):
        if path.is_file():  # pyenv's shims fail for versions that are not selected
            answer = subprocess.run([path, "-c", query], capture_output=True, text=True, check=False)
            if answer.returncode == 0:
                paths.setdefault(answer.stdout.strip(), path)
    return paths | {platform.python_version(): Path(sys.executable)}


def start(version: str, interpreter: Path, checkpoint: Path) -> subprocess.Popen[str]:
    """Starts `exchange` on an interpreter."""
    isolated = ["uv", "run", "--quiet", "--isolated", "--package", "armillary-train", "--python"]
    is_this_python = version == platform.python_version()
    command = [sys.executable] if is_this_python else [*isolated, str(interpreter), "python"]
    command += [__file__, str(checkpoint)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def exchange(checkpoint: Path) -> None:
    """Saves a checkpoint, waits until stdin is closed, and reads the checkpoints of all Pythons."""
    import torch

    from armillary.train.checkpoint.tensors_and_manifest import SavedTensors, save_tensors

    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8)
    tensors = {str(dtype): torch.arange(96).reshape(8, 12).to(dtype) for dtype in dtypes}
    checkpoint.mkdir()
    save_tensors(checkpoint, {"model": tensors})
    print("saved", flush=True)
    sys.stdin.read()
    for other in sorted(checkpoint.parent.iterdir()):
        values = SavedTensors(other, os.listdir(other)).read("model")
        if values.keys() != tensors.keys() or not all(torch.equal(values[name], tensors[name]) for name in tensors):
            sys.exit(f"Python {checkpoint.name} reads other values than Python {other.name} has written")


def main() -> None:
    pythons = interpreters()
    print("Python", ", ".join(sorted(pythons)), flush=True)
    processes: dict[str, subprocess.Popen[str]] = {}

    def time_out(*_: object) -> None:
        running = [version for version, process in processes.items() if process.poll() is None]
        for version in running:
            processes[version].kill()
        sys.exit(f"no end after {TIMEOUT} s on Python {', '.join(running)}")

    signal.signal(signal.SIGALRM, time_out)
    signal.alarm(TIMEOUT)
    with tempfile.TemporaryDirectory() as folder:
        for version, path in pythons.items():
            processes[version] = start(version, path, Path(folder, version))
        # Every Python starts once, because importing torch takes seconds. All save before any of them reads.
        replies = {version: process.stdout and process.stdout.readline() for version, process in processes.items()}
        for process in processes.values():
            process.communicate()
    failures = [
        version for version, process in processes.items() if process.returncode or replies[version] != "saved\n"
    ]
    if failures:
        sys.exit(f"failed on Python {', '.join(failures)}")


if __name__ == "__main__":
    exchange(Path(sys.argv[1])) if len(sys.argv) > 1 else main()
