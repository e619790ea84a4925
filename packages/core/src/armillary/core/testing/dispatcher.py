"""Counts bytes and messages of torch.distributed in torch's dispatcher, to prove that a ledger counts them all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from armillary.core import compat
from armillary.core.ledger import CommLedger


class Traffic(NamedTuple):
    """The bytes and messages that a rank sends to other ranks."""

    bytes: int
    messages: int


class Dispatched(TorchDispatchMode):
    """Dispatch mode that counts all bytes which this rank passes to torch.distributed for other ranks.

        with Dispatched() as dispatched, CommLedger() as ledger:
            ...
        assert dispatched.sent == Dispatched.of(ledger)

    Counts are by operation: "p2p", "all_to_all", "all_gather" and "all_reduce". Operations outside of `KINDS`, such as
    the reduce-scatters of FSDP, which a ledger does not count, are counted under torch's name, with the bytes of their
    arguments. Barriers do not count. The mode is active in autograd's threads too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent: dict[str, Traffic] = {}

    @staticmethod
    def of(ledger: CommLedger) -> dict[str, Traffic]:
        """Returns the counts of a ledger in the form of `sent`: a reduce-scatter of ours is an all-to-all of torch."""
        traffic: dict[str, Traffic] = {}
        for key, nbytes in ledger.entries.items():
            kind = "all_to_all" if key[1] == "reduce_scatter" else key[1]
            _add(traffic, kind, Traffic(nbytes, ledger.sends[key]))
        return traffic

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        from torch.distributed.tensor import DTensor  # takes seconds, and `armillary.core.testing` is in a command

        if DTensor in types:
            return NotImplemented  # DTensor then dispatches ops on local tensors
        if func.namespace == "armillary":
            # Run the implementation of our op, whose operations the dispatcher would not show to this mode.
            with self:
                return compat.function_of(func)(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            kind, count = KINDS.get(func.name(), (func.name(), all_arguments))
            _add(self.sent, kind, count(*args))
        return func(*args, **(kwargs or {}))


def _add(traffic: dict[str, Traffic], kind: str, added: Traffic) -> None:
    if added.bytes or added.messages:
        before = traffic.get(kind, Traffic(0, 0))
        traffic[kind] = Traffic(before.bytes + added.bytes, before.messages + added.messages)


# Each of these functions takes the arguments of an operation of torch.distributed and returns the operation's traffic.


def sends(tensors: Sequence[Tensor], *_: Any) -> Traffic:
    return Traffic(sum(x.nbytes for x in tensors), 1)


def nothing(*_: Any) -> Traffic:
    return Traffic(0, 0)


def all_to_all(output: Tensor, x: Tensor, boxed: Any, output_rows: list[int], rows: list[int], *_: Any) -> Traffic:
    group = compat.unbox_group(boxed)
    rows = rows or [x.shape[0] // group.size()] * group.size()
    sent_rows = [n for rank, n in enumerate(rows) if n and rank != group.rank()]
    return Traffic(sum(sent_rows) * x[:1].nbytes, len(sent_rows))


def all_gather(output: Tensor, x: Tensor, boxed: Any, *_: Any) -> Traffic:
    peers = compat.unbox_group(boxed).size() - 1
    return Traffic(peers * x.nbytes, peers)


def all_gather_list(output: Sequence[Sequence[Tensor]], tensors: Sequence[Tensor], boxed: Any, *_: Any) -> Traffic:
    peers = compat.unbox_group(boxed).size() - 1
    return Traffic(peers * sum(x.nbytes for x in tensors), peers)


def all_reduce(tensors: Sequence[Tensor], boxed: Any, *_: Any) -> Traffic:
    ranks = compat.unbox_group(boxed).size()
    return Traffic(sum(2 * (ranks - 1) * x.nbytes // ranks for x in tensors), 2 * (ranks - 1))


def all_arguments(*args: Any) -> Traffic:
    return Traffic(sum(x.nbytes for x in tree_leaves(args) if isinstance(x, Tensor)), 1)


KINDS: dict[str, tuple[str, Callable[..., Traffic]]] = {
    "c10d::send": ("p2p", sends),
    "c10d::recv_": ("p2p", nothing),
    "c10d::barrier": ("barrier", nothing),
    "c10d::alltoall_base_": ("all_to_all", all_to_all),
    "c10d::_allgather_base_": ("all_gather", all_gather),
    "c10d::allgather_": ("all_gather", all_gather_list),
    "c10d::allreduce_": ("all_reduce", all_reduce),
}
"""By operation of torch: the name under which it is counted, and the function that counts it."""
