"""What reaches torch.distributed, seen from torch's dispatcher: to prove that a ledger misses nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from armillary.core import compat
from armillary.core.observe.ledger import CommLedger


class Traffic(NamedTuple):
    """What a rank sends to others by one operation, and in how many messages."""

    bytes: int
    messages: int


class Dispatched(TorchDispatchMode):
    """While it is open, counts what this rank hands to torch.distributed for other ranks, whoever does so.

        with Dispatched() as seen, CommLedger() as ledger:
            ...
        assert seen.sent == Dispatched.of(ledger)

    Kinds are those of the operations: "p2p", "all_to_all" and "all_gather". Anything else, such as an all-reduce of
    FSDP's or DTensor's, which a ledger does not count, stands under its own name with the bytes handed over. Ops of
    armillary's, which torch shows to a mode as one piece, run as what they are made of. Autograd takes the mode along
    to threads of its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent: dict[str, Traffic] = {}

    @staticmethod
    def of(ledger: CommLedger) -> dict[str, Traffic]:
        """What a ledger's entries are for torch.distributed: a reduce-scatter here is an all-to-all there."""
        found: dict[str, Traffic] = {}
        for key, sent in ledger.entries.items():
            kind = "all_to_all" if key[1] == "reduce_scatter" else key[1]
            _add(found, kind, Traffic(sent, ledger.sends[key]))
        return found

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if DTensor in types:
            return NotImplemented  # it comes back with the ops on its local tensors
        if func.namespace == "armillary":
            with self:
                return compat.function_of(func)(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            kind, count = KINDS.get(func.name(), (func.name(), handed_over))
            _add(self.sent, kind, count(*args))
        return func(*args, **(kwargs or {}))


def _add(found: dict[str, Traffic], kind: str, sent: Traffic) -> None:
    if sent.bytes or sent.messages:
        before = found.get(kind, Traffic(0, 0))
        found[kind] = Traffic(before.bytes + sent.bytes, before.messages + sent.messages)


def sends(tensors: Sequence[Tensor], *_: Any) -> Traffic:
    return Traffic(sum(x.nbytes for x in tensors), 1)


def nothing(*_: Any) -> Traffic:
    return Traffic(0, 0)


def all_to_all(output: Tensor, x: Tensor, boxed: Any, output_rows: list[int], rows: list[int], *_: Any) -> Traffic:
    group = compat.unboxed(boxed)
    rows = rows or [x.shape[0] // group.size()] * group.size()
    others = [n for rank, n in enumerate(rows) if n and rank != group.rank()]
    return Traffic(sum(others) * x[:1].nbytes, len(others))


def all_gather(output: Tensor, x: Tensor, boxed: Any, *_: Any) -> Traffic:
    others = compat.unboxed(boxed).size() - 1
    return Traffic(others * x.nbytes, others)


def all_gather_list(output: Sequence[Sequence[Tensor]], tensors: Sequence[Tensor], boxed: Any, *_: Any) -> Traffic:
    others = compat.unboxed(boxed).size() - 1
    return Traffic(others * sum(x.nbytes for x in tensors), others)


def handed_over(*args: Any) -> Traffic:
    return Traffic(sum(x.nbytes for x in _tensors(args)), 1)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:  # pyright: ignore[reportUnknownVariableType]
            yield from _tensors(item)


KINDS: dict[str, tuple[str, Callable[..., Traffic]]] = {
    "c10d::send": ("p2p", sends),
    "c10d::recv_": ("p2p", nothing),
    "c10d::barrier": ("barrier", nothing),
    "c10d::alltoall_base_": ("all_to_all", all_to_all),
    "c10d::_allgather_base_": ("all_gather", all_gather),
    "c10d::allgather_": ("all_gather", all_gather_list),
}
"""By operation: as what it is counted, and how much of its arguments is sent."""
