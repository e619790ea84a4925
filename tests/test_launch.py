"""The files in launch/: torchrun and the trainer accept their flags; the Slurm script saves and requeues."""

import os
import re
import signal
import subprocess
import time
import tomllib
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import get_args_parser

from armillary.train import Config
from armillary.train.cli import read_command

LAUNCH = Path(__file__).parent.parent / "launch"

# Stubs of Slurm's commands, and of torchrun, which waits for a signal or exits at once.
COMMANDS = {
    "scontrol": 'if [ "$1" = show ]; then printf "gpu-7\\ngpu-9\\n"; else echo "$@" >> requeued; fi',
    "scancel": 'echo "$@" >> cancelled; kill -USR1 "$(cat pid)"',
    "srun": 'shift; exec "$@"',
    "torchrun": """
trap 'exit 1' USR1
echo $$ > pid
printf '%s\\n' "$@" > arguments.partial
mv arguments.partial arguments
[ -e ends ] && exit "$(cat ends)"
while true; do sleep 0.05; done
""",
}


@pytest.fixture
def job(tmp_path):
    """Starts the Slurm script as Slurm would, in the folder to which the stubs write."""
    for name, body in COMMANDS.items():
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    slurm = {"JOB_NODELIST": "gpu-[7,9]", "JOB_ID": "42", "NNODES": "2", "GPUS_ON_NODE": "8"}
    environment = os.environ | {f"SLURM_{name}": value for name, value in slurm.items()}
    environment |= {"SLURM_SUBMIT_DIR": str(tmp_path), "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    started = []

    def start(*flags: str) -> subprocess.Popen:
        started.append(subprocess.Popen(["bash", LAUNCH / "slurm.sbatch", *flags], cwd=tmp_path, env=environment))
        return started[0]

    yield start
    for process in started:
        process.kill()


def read_when_written(path: Path) -> str:
    for _ in range(1200):
        if path.exists():
            return path.read_text()
        time.sleep(0.05)
    raise AssertionError(f"{path} was not written in a minute")


def parse_command(arguments: list[str]) -> tuple[object, Config]:
    """Parses a command line as torchrun and the trainer do; both refuse unknown flags."""
    options = get_args_parser().parse_args(arguments)
    assert options.module and options.training_script == "armillary.train"
    return options, read_command(options.training_script_args)[0].run


def test_slurm_script_starts_all_ranks_of_all_nodes(job, tmp_path):
    (tmp_path / "ends").write_text("3")
    assert job("--train.steps", "7").wait(60) == 3
    options, config = parse_command((tmp_path / "arguments").read_text().splitlines())
    assert (options.nnodes, options.nproc_per_node, options.max_restarts) == ("2", "8", 3)
    assert (options.rdzv_backend, options.rdzv_endpoint, options.rdzv_id) == ("c10d", "gpu-7:29400", "42")
    assert "SIGUSR1" in options.signals_to_handle and options.shutdown_timeout == 540
    assert (config.train.output, config.train.steps) == (tmp_path / "outputs", 7)
    assert not (tmp_path / "requeued").exists()


def test_slurm_script_uses_the_virtual_environment_of_its_folder(job, tmp_path):
    programs = tmp_path / ".venv/bin"
    programs.mkdir(parents=True)
    (tmp_path / "bin/torchrun").rename(programs / "torchrun")
    (tmp_path / "ends").write_text("0")
    assert job().wait(60) == 0
    parse_command((tmp_path / "arguments").read_text().splitlines())


def test_slurm_script_saves_and_requeues_at_its_time_limit(job, tmp_path):
    script = job()
    read_when_written(tmp_path / "arguments")
    script.send_signal(signal.SIGUSR1)
    assert script.wait(60) == 0
    assert (tmp_path / "cancelled").read_text() == "--signal=USR1 42\n"
    assert (tmp_path / "requeued").read_text() == "requeue 42\n"


def test_grace_periods_exceed_torchruns_shutdown_timeout():
    limits = [
        line for line in (LAUNCH / "slurm.sbatch").read_text().splitlines() if line.startswith("#SBATCH --signal")
    ]
    assert [int(line.split("@")[1].split()[0]) for line in limits] == [600]
    assert pod()["terminationGracePeriodSeconds"] == 600


def pod() -> dict:
    jobset = yaml.safe_load((LAUNCH / "kubernetes.yaml").read_text())
    (replicated,) = jobset["spec"]["replicatedJobs"]
    return replicated["template"]["spec"]["template"]["spec"]


def test_the_pods_run_the_image_of_the_repositorys_dockerfile():
    dockerfile = (LAUNCH / "Dockerfile").read_text()
    (container,) = pod()["containers"]
    version = tomllib.loads((LAUNCH.parent / "packages/train/pyproject.toml").read_text())["project"]["version"]
    assert container["image"] == f"armillary:{version}" in dockerfile
    copied = re.findall(r"^COPY (\S+) ", dockerfile, re.MULTILINE)
    assert all((LAUNCH.parent / path).exists() for path in copied)
    ignored = (LAUNCH.parent / ".dockerignore").read_text().splitlines()
    assert [line for line in ignored if line.startswith("!")] == [f"!{path}" for path in copied]
    folder = re.findall(r"^WORKDIR (\S+)$", dockerfile, re.MULTILINE)[-1]
    assert f"ENV PATH={folder}/.venv/bin:$PATH" in dockerfile


@pytest.mark.parametrize(("index", "host"), [("0", "true"), ("1", "false")])
def test_the_kubernetes_pods_start_all_ranks_of_all_nodes(tmp_path, index, host):
    jobset = yaml.safe_load((LAUNCH / "kubernetes.yaml").read_text())
    (replicated,) = jobset["spec"]["replicatedJobs"]
    (container,) = pod()["containers"]
    stand_in = tmp_path / "torchrun"
    stand_in.write_text("#!/usr/bin/env bash\nprintf '%s\\n' \"$@\"\n")
    stand_in.chmod(0o755)
    environment = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "JOB_COMPLETION_INDEX": index}
    messages = subprocess.run(
        container["command"], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    options, config = parse_command(messages.stdout.splitlines())
    job = replicated["template"]["spec"]
    assert int(options.nnodes) == job["parallelism"] == job["completions"]
    assert int(options.nproc_per_node) == container["resources"]["limits"]["nvidia.com/gpu"]
    first = f"{jobset['metadata']['name']}-{replicated['name']}-0-0.{jobset['metadata']['name']}"
    assert options.rdzv_endpoint == f"{first}:29400" and options.rdzv_conf == f"is_host={host}"
    assert options.shutdown_timeout == 540 and config.train.output in {
        Path(v["mountPath"]) for v in container["volumeMounts"]
    }
