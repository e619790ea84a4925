"""`Cluster`: identical nodes, from a preset's name or a TOML file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from armillary.attention.plans import Send
from armillary.core.parts import parse_toml, read_file
from armillary.plan.cluster.machines import EMULATED, MACHINES
from armillary.plan.cluster.network import CHECKED, Count, Delivery, Level, Link, deliveries
from armillary.plan.cluster.node import Accelerator, Node

TABLES = {"accelerator": Accelerator, "within": Link, "between": Link, "switch": Link}
"""Tables of a cluster's file."""


@dataclass(frozen=True, kw_only=True, config=CHECKED)
class Cluster(Node):
    """A number (`nodes`) of identical machines, whose accelerators and links are the fields of `Node`.

    Raises:
        ValueError: as `Node`.
    """

    nodes: Count

    @property
    def ranks(self) -> int:
        """Number of ranks, one for each accelerator of all machines."""
        return self.nodes * self.ranks_per_node

    @property
    def levels(self) -> tuple[Level, ...]:
        """Levels of the network, from the smallest groups of ranks (a PCIe switch, or a node) to all ranks."""
        switch = () if self.switch is None else (Level("switch", self.switch_ranks, self.switch),)
        node = Level("within", self.ranks_per_node, self.within)
        return (*switch, node, Level("between", self.ranks, self.between, card=self.ranks_per_node))

    def deliveries(self, sends: Iterable[Send]) -> list[Delivery]:
        """Timing of sends that start together. Ranks 0, 1, ... are on the first machine, the next on the second.

        Sends of 0 bytes, or from a rank to itself, are left out.
        """
        rows = [send for send in sends if send.bytes and send.source != send.target]
        table = np.array(rows, np.int64).reshape(-1, 3)
        timed = deliveries(self.levels, table, np.zeros(len(rows), np.int64))
        return [
            Delivery(source, target, seconds, sending, self.levels[level].link)
            for source, target, seconds, sending, level in zip(*(values.tolist() for values in timed), strict=True)
        ]

    def transit(self, sends: Iterable[Send]) -> float:
        """Seconds until all of these concurrent sends have arrived."""
        return max((delivery.seconds for delivery in self.deliveries(sends)), default=0.0)

    @classmethod
    def named(cls, name: str) -> Cluster:
        """Returns a preset: "8xh100", "64xh100-ethernet", "8xl20" or "emulated-...".

        The number counts accelerators. Machines are listed in `armillary.plan.cluster.machines`.

        Raises:
            ValueError: an unknown machine, or accelerators that do not fill whole nodes.
        """
        nodes, machine, full_name = 0, None, ""
        if name in EMULATED:
            nodes, machine = EMULATED[name]
            full_name = machine.name
        elif (match := re.fullmatch(r"(\d+)x(.+)", name)) and (machine := MACHINES.get(match[2])):
            full_name = f"{match[1]} x {machine.name}"
            if int(match[1]) % machine.ranks_per_node == 0:
                nodes = int(match[1]) // machine.ranks_per_node
        if machine is None or not nodes:
            presets = [f"{machine.ranks_per_node}x{kind}" for kind, machine in MACHINES.items()]
            raise ValueError(
                f"no cluster {name!r}; known: {', '.join(presets)} and multiples of them; {', '.join(EMULATED)}"
            )
        settings: dict[str, Any] = {field.name: getattr(machine, field.name) for field in fields(machine)}
        settings |= {"nodes": nodes, "name": full_name}
        return cls(**settings)

    @classmethod
    def load(cls, path: Path | str) -> Cluster:
        """Reads a cluster from a TOML file.

            like = "8xh100"              # a preset, which the other lines change; by default none
            nodes = 4
            host_memory = "1.5TB"
            [between]
            bandwidth = "11GB"           # per second and direction
            latency = 5e-5
            per = "group"
            [accelerator]
            memory = "80GB"

        Raises:
            ValueError: invalid TOML, an unknown preset, unknown or missing keys, or values outside their range. Names
                the file.
            OSError: the file cannot be read.
        """
        try:
            settings = parse_toml(read_file(path))
            preset = settings.pop("like", None)
            if not isinstance(preset, str | None):
                raise ValueError(f"like = {preset!r} must be the name of a cluster")
            # A preset and the file's values are merged as plain data and validated together.
            base = {} if preset is None else asdict(cls.named(preset))
            return TypeAdapter(cls).validate_python(_merge(base, {"name": Path(path).stem, **settings}))
        except ValidationError as error:
            raise ValueError(f"{path}: {'; '.join(map(_describe_error, error.errors()))}") from None
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


def _merge(base: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `base` updated by `settings`, table by table."""
    tables = {key: _merge(base.get(key) or {}, value) for key, value in settings.items() if isinstance(value, dict)}
    return {**base, **settings, **tables}


def _describe_error(detail: Any) -> str:
    """Describes one of pydantic's errors, with the key and its value or the known keys."""
    key = ".".join(map(str, detail["loc"]))
    if detail["type"] == "unexpected_keyword_argument":
        table = TABLES.get(detail["loc"][0], Cluster) if len(detail["loc"]) > 1 else Cluster
        return f"unknown key {key}; known: {', '.join(field.name for field in fields(table))}"
    if detail["type"].startswith("missing"):
        return f"missing key {key}"
    return f"{key} = {detail['input']!r}: {detail['msg']}" if key else detail["msg"]
