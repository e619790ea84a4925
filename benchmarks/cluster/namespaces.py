"""Several hosts on one machine: network namespaces, joined by an isolated switch.

with Namespaces(2) as hosts:
    for i in range(2):
        hosts.run(i, ["torchrun", "--nnodes", "2", "--local-addr", hosts.addresses[i], ...])
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import count as counting
from pathlib import Path
from socket import gethostname
from typing import Any, Self

CONFIGURED = Path("/etc/netns")
"""Folder from which `ip netns exec` mounts files into /etc of a namespace."""

_numbers = counting()
"""Numbers the namespaces of this process; names also contain the process id."""


class Namespaces:
    """`count` network namespaces that reach only each other, through their interface `INTERFACE`.

    A context manager: its end removes the namespaces and kills the processes in them. `tc` slows their traffic down:
    `run(i, ["tc", "qdisc", "add", "dev", Namespaces.INTERFACE, ...])`.

    Args:
        count: number of hosts, 1 to 250.

    Raises:
        ValueError: another count, or an unsupported machine; see `obstacle`.
    """

    INTERFACE = "eth0"

    def __init__(self, count: int) -> None:
        if not 1 <= count <= 250:
            raise ValueError(f"{count} namespaces: between 1 and 250 can be joined")
        if (reason := obstacle()) is not None:
            raise ValueError(reason)
        prefix = f"armillary-{os.getpid()}-{next(_numbers)}"
        self.names = [f"{prefix}-{i}" for i in range(count)]
        self.addresses = [f"10.77.0.{i + 1}" for i in range(count)]
        self._switch = f"{prefix}-switch"

    def __enter__(self) -> Self:
        try:
            self._create()
            for i in range(len(self.names)):
                self._name_hosts(i)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, i: int, argv: Sequence[str], **kwargs: Any) -> subprocess.Popen[Any]:
        """Starts a program on host `i` like `subprocess.Popen(argv, **kwargs)`; sets the interface of gloo and NCCL."""
        environment: Mapping[str, str] = kwargs.pop("env", None) or os.environ
        names = {"GLOO_SOCKET_IFNAME": self.INTERFACE, "NCCL_SOCKET_IFNAME": self.INTERFACE}
        return subprocess.Popen(["ip", "netns", "exec", self.names[i], *argv], env={**environment, **names}, **kwargs)

    def kill(self, i: int) -> None:
        """Kills all processes on host `i`, like a power cut.

        All are stopped first, because a process killed later could report the death of an earlier one.
        """
        pids = [int(pid) for pid in _ip("netns", "pids", self.names[i]).split()]
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    def close(self) -> None:
        """Kills remaining processes and removes the namespaces. May be called again."""
        existing = {line.split()[0] for line in _ip("netns", "list").splitlines() if line}
        for i, name in enumerate(self.names):
            if name in existing:
                self.kill(i)
        for name in (*self.names, self._switch):
            shutil.rmtree(CONFIGURED / name, ignore_errors=True)
            if name in existing:
                _ip("netns", "delete", name)

    def _create(self) -> None:
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "switch", "up")
        for i, (name, address) in enumerate(zip(self.names, self.addresses, strict=True)):
            port = f"port{i}"
            _ip("netns", "add", name)
            pair = ("link", "add", "name", self.INTERFACE, "type", "veth", "peer", "name", port, "netns", self._switch)
            _ip("-n", name, *pair)
            _ip("-n", self._switch, "link", "set", port, "master", "switch", "up")
            _ip("-n", name, "address", "add", f"{address}/24", "dev", self.INTERFACE)
            for device in ("lo", self.INTERFACE):
                _ip("-n", name, "link", "set", device, "up")

    def _name_hosts(self, i: int) -> None:
        """Writes all host names to the hosts file of host `i`, so that lookups do not wait for DNS."""
        lines = ["127.0.0.1 localhost", f"{self.addresses[i]} {gethostname()}"]
        lines += [f"{address} host-{j}" for j, address in enumerate(self.addresses)]
        (CONFIGURED / self.names[i]).mkdir(parents=True)
        (CONFIGURED / self.names[i] / "hosts").write_text("\n".join(lines) + "\n")


def obstacle() -> str | None:
    """The reason why `Namespaces` do not work on this machine, or None."""
    if shutil.which("ip") is None:
        return "network namespaces need the program ip; install iproute2"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"armillary-{os.getpid()}-probe"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if tried.returncode != 0:
        return f"network namespaces cannot be made here: {tried.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", name], capture_output=True)
    return None


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout
