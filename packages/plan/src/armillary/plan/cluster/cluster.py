"""What a planner needs to know of the machines."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from armillary.core.files import parse_toml
from armillary.core.network import Send
from armillary.core.quantity import quantity
from armillary.plan.cluster.machines import EMULATED, MACHINES
from armillary.plan.cluster.network import Delivery, Level, Link, deliveries
from armillary.plan.cluster.node import Accelerator, Node


@dataclass(frozen=True, kw_only=True)
class Cluster(Node):
    """Identical machines.

    Args:
        nodes: how many.

    Raises:
        ValueError: as `Node`.
    """

    nodes: int

    @property
    def ranks(self) -> int:
        """Accelerators of all machines."""
        return self.nodes * self.ranks_per_node

    @property
    def levels(self) -> tuple[Level, ...]:
        """Groups of ranks that reach each other by one kind of link, from the smallest to all."""
        inner = () if self.switch is None else (Level("switch", self.switch_ranks, self.switch),)
        node = Level("within", self.ranks_per_node, self.within)
        return (*inner, node, Level("between", self.ranks, self.between, card=self.ranks_per_node))

    def deliveries(self, sends: Iterable[Send]) -> list[Delivery]:
        """How long each of some sends takes that are under way together. Ranks fill one machine after another."""
        return deliveries(self.levels, sends)

    def transit(self, sends: Iterable[Send]) -> float:
        """Seconds until all of them have arrived."""
        return max((delivery.seconds for delivery in self.deliveries(sends)), default=0.0)

    @classmethod
    def of(cls, machine: Node, nodes: int, name: str) -> Cluster:
        """So many identical machines."""
        given: dict[str, Any] = {each.name: getattr(machine, each.name) for each in fields(machine)}
        given |= {"nodes": nodes, "name": name}
        return cls(**given)

    @classmethod
    def named(cls, name: str) -> Cluster:
        """A preset: "8xh100", "64xh100-ethernet", "8xl20" or "emulated-..."; see `armillary.plan.cluster.machines`.

        Raises:
            ValueError: no such machine, or accelerators that do not fill nodes.
        """
        if name in EMULATED:
            count, machine = EMULATED[name]
            return cls.of(machine, count, machine.name)
        found = re.fullmatch(r"(\d+)x(.+)", name)
        if found and found[2] in MACHINES:
            machine = MACHINES[found[2]]
            count, rest = divmod(int(found[1]), machine.ranks_per_node)
            if count and not rest:
                return cls.of(machine, count, f"{found[1]} x {machine.name}")
        known = [f"{machine.ranks_per_node}x{kind}" for kind, machine in MACHINES.items()]
        raise ValueError(f"no cluster {name!r}; known: {', '.join(known)} and multiples of them; {', '.join(EMULATED)}")

    @classmethod
    def load(cls, path: Path | str) -> Cluster:
        """A cluster from a TOML file.

            like = "8xh100"              # a preset that all else differs from; or all fields are given
            nodes = 4
            host_memory = "1.5TB"
            [between]
            bandwidth = "11GB"           # a second, each way
            latency = 5e-5
            per = "group"
            [accelerator]
            memory = "80GB"

        Raises:
            ValueError: unknown or missing keys, or values that do not fit; names the file.
            OSError: it cannot be read.
        """
        try:
            given = parse_toml(Path(path).read_text())
            like = given.pop("like", None)
            if not isinstance(like, str | None):
                raise ValueError(f"like = {like!r} must be the name of a cluster")
            base = _plain(cls.named(like)) if like else dict[str, Any]()
            return _built(cls, _joined(base, {"name": Path(path).stem, **given}))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


PARTS = {"accelerator": Accelerator, "within": Link, "between": Link, "switch": Link}
WORDS = ("name", "per")
"""Keys whose values are text; other text is a quantity such as "80GB"."""


def _plain(value: Any) -> dict[str, Any]:
    """What `_built` makes the value of."""
    found = {each.name: getattr(value, each.name) for each in fields(value)}
    return {key: _plain(x) if key in PARTS else x for key, x in found.items() if x is not None}


def _joined(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """The second over the first, table by table."""
    tables = (key for key in over if isinstance(over[key], dict))
    return {**base, **over, **{key: _joined(base.get(key) or {}, over[key]) for key in tables}}


def _built(kind: type[Any], given: Mapping[str, Any], table: str = "") -> Any:
    known = [each.name for each in fields(kind)]
    needed = [each.name for each in fields(kind) if each.default is MISSING]
    wrong = [f"{table}{key}" for key in given if key not in known]
    missing = [f"{table}{key}" for key in needed if key not in given]
    if wrong or missing:
        raise ValueError(
            f"unknown keys {wrong}, missing keys {missing}; known: {', '.join(table + key for key in known)}"
        )
    values = {key: _value(key, value, table) for key, value in given.items()}
    return kind(**values)


def _value(key: str, value: Any, table: str) -> Any:
    if key in PARTS and not isinstance(value, dict):
        raise ValueError(f"{table}{key} = {value!r} must be a table")
    if key in PARTS:
        return _built(PARTS[key], value, f"{table}{key}.")
    if key in WORDS:
        return str(value)
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(f'{table}{key} = {value!r} must be a number, or a quantity such as "80GB"')
    try:
        return quantity(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f"{table}{key}: {error}") from error
