"""Merging of partial attention results: errors, bandwidth, launches, and a memory checker."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from armillary.core.collectives.merge import fused_kernel, merge_by_ops_
from armillary.core.testing import relative_error
from gpu.check import Check, Row, Setting, correct, not_run
from gpu.kernels import SOURCE
from gpu.launch import environment

MERGED_LIMIT = 1e-6
"""Limit of the relative error of float32 accumulators: a few roundings."""


def check_merge(setting: Setting) -> Iterator[Row]:
    """Error of the fused kernel against torch's ops in float64, and its speed relative to torch's ops."""
    kernel = fused_kernel(setting.device.type)
    yield setting.is_so(
        "fused kernel", "none" if kernel is None else kernel.__name__, kernel is not None, "one", "Triton"
    )
    merge = kernel or merge_by_ops_
    for tokens, name in ((setting.size(4096, 24), "tokens first"), (setting.size(4093, 23), "heads first")):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            tensors = partial_results(setting, tokens, dtype, name == "heads first")
            expected, result = [x.double() for x in tensors], [x.clone() for x in tensors]
            merge_by_ops_(*expected)
            merge(*result)
            label = f"{str(dtype).removeprefix('torch.')}, {tokens:,} {name}"
            for tensor, x, y in zip(("out", "lse"), result, expected, strict=False):
                is_finite = y.isfinite()
                same = torch.equal(is_finite, x.isfinite())
                error = relative_error(x[is_finite], y[is_finite]) if same else torch.inf
                yield correct(f"{label}: {tensor}", error, MERGED_LIMIT, SOURCE)
    tensors = partial_results(setting, setting.size(32_768, 24), torch.bfloat16, heads_first=False)
    fused, ops = (
        setting.device.seconds(partial(merge_function, *tensors), 10) for merge_function in (merge, merge_by_ops_)
    )
    moved = tensors[0].numel() * (4 + 2 + 4) / fused
    yield setting.at_least("fused over torch's ops", ops / fused, 1.5, "x", "10 bytes an element, not 18")
    yield Row("bytes of out and its part", moved / 1e12, "TB/s", source="of 3.35 on an H100, 4.8 on an H200")


def partial_results(setting: Setting, tokens: int, dtype: torch.dtype, heads_first: bool) -> list[Tensor]:
    """Two partial results (out, lse), in which some rows have seen no key; lse has the kernels' layout."""
    torch.manual_seed(0)
    shape, place = (1, tokens, setting.size(32, 2), 128), {"device": setting.device.torch}
    out, other_out = torch.randn(shape, **place), torch.randn(shape, dtype=dtype, **place)
    if heads_first:
        other_out = other_out.transpose(1, 2).contiguous().transpose(1, 2)
    lse, other_lse = (torch.randn(1, shape[2], tokens, **place).transpose(1, 2) for _ in range(2))
    for hidden, x, its_lse in ((slice(0, None, 3), out, lse), (slice(0, None, 5), other_out, other_lse)):
        x[:, hidden], its_lse[:, hidden] = 0, -torch.inf
    return [out, lse, other_out, other_lse]


# -- launches ----------------------------------------------------------------------------------------------------------

LAUNCHES = 50
"""Merges in a row, so that one timer's resolution and noise are shared by many."""


def check_launches(setting: Setting) -> Iterator[Row]:
    """Host microseconds of a merge, and how many tokens keep the device busy as long."""
    kernel = fused_kernel(setting.device.type)
    if kernel is None:
        yield not_run("the fused kernel", f"there is none on {setting.device.name}")
    for tokens in setting.size((64, 512, 4096), (8,)):
        tensors = partial_results(setting, tokens, torch.bfloat16, heads_first=False)
        host = dict[str, float]()
        for name, merge in {"torch's ops": merge_by_ops_, "fused": kernel}.items():
            if merge is None:
                continue
            many = partial(repeat, partial(merge, *tensors), setting.size(LAUNCHES, 2))
            host[name], device = (
                seconds / setting.size(LAUNCHES, 2) for seconds in (setting.host_time(many), setting.time(many))
            )
            label = f"{name}, {tokens:,} tokens of {tensors[0].shape[2]} heads: host; device {1e6 * device:.3g} us"
            yield Row(label, 1e6 * host[name], "us")
        if "fused" in host:
            label, ratio = f"{tokens:,} tokens: host time, fused over torch's ops", host["fused"] / host["torch's ops"]
            yield setting.at_most(label, ratio, 1.0, "", "one launch in place of seven")


def repeat(work: Callable[[], object], times: int) -> None:
    for _ in range(times):
        work()


# -- compute-sanitizer -------------------------------------------------------------------------------------------------

SANITIZER = "compute-sanitizer"
TOOL_SECONDS = 50
TOOLS = {"memcheck": "accesses outside of tensors", "racecheck": "races in shared memory"}
CUDA_FOLDERS = ("/usr/local/cuda/bin", "/opt/cuda/bin")
KERNEL = "_merge_rows"
"""Name of the Triton kernel. The tool checks no other kernel, which would take minutes."""
MERGES = """
import torch
from armillary.core.collectives.merge import fused_kernel, merge_by_ops_
device = "{device}"
merge = fused_kernel(device) or merge_by_ops_
for shape in ((1, 1, 1, 64), (2, 37, 3, 128), (1, 129, 5, 80)):
    for dtype in (torch.bfloat16, torch.float32):
        out, part = torch.randn(shape, device=device), torch.randn(shape, device=device).to(dtype)
        lse, part_lse = torch.randn(shape[:3], device=device), torch.randn(shape[:3], device=device)
        merge(out, lse, part, part_lse)
        merge(out.transpose(1, 2), lse.transpose(1, 2), part.transpose(1, 2), part_lse.transpose(1, 2))
        assert out.isfinite().all()
print("merged by", merge.__name__)
"""


def check_sanitizer(setting: Setting) -> Iterator[Row]:
    """The fused merge under compute-sanitizer, on shapes that fill no block of threads."""
    program = [sys.executable, "-c", MERGES.format(device=setting.device.type)]
    plain = completed(program)
    yield Row("merges without the tool", last_line(plain), "", "no error", "Triton", plain.returncode == 0)
    tool = shutil.which(SANITIZER, path=os.pathsep.join([os.environ.get("PATH", ""), *CUDA_FOLDERS]))
    for name, errors in TOOLS.items():
        label, options = f"{name}: {errors}", ("--tool", name, "--kernel-name", f"kernel_substring={KERNEL}")
        if tool is None or setting.device.type != "cuda":
            yield not_run(label, "no GPU is here" if tool else f"no {SANITIZER} is on this machine")
            continue
        checked = completed([tool, "--error-exitcode", "9", *options, *program])
        summary = [each.strip("= ") for each in checked.stdout.splitlines() if "SUMMARY" in each]
        if summary:
            yield Row(label, summary[-1], "", "0 errors", SANITIZER, checked.returncode == 0)
        else:  # some drivers refuse the tool
            yield not_run(label, f"{SANITIZER} ended with {checked.returncode}: {last_line(checked)}")


def completed(command: list[str]) -> subprocess.CompletedProcess[str]:
    """A process that has ended, by itself or after `TOOL_SECONDS`, with both outputs in `stdout`."""
    run = partial(subprocess.run, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment())
    try:
        return run(command, timeout=TOOL_SECONDS)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, -1, f"killed after {TOOL_SECONDS} s")


def last_line(process: subprocess.CompletedProcess[str]) -> str:
    return (process.stdout.strip().splitlines() or ["no output"])[-1]


CHECKS = (
    Check("merge", "Partial attention merged by one kernel", check_merge, "float32's roundings; 1.5x torch's ops", 30),
    Check("merge-launch", "Host time of small merges", check_launches, "at most that of torch's ops", 15),
    Check("sanitizer", "compute-sanitizer on the merge", check_sanitizer, "no error", 120),
)
