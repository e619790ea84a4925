"""What one run of a block has for its backward: what it kept, and what it computes again."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, Protocol, runtime_checkable
from weakref import ref

import torch
from torch import Tensor

from armillary.core import compat
from armillary.models.activation_checkpoint.keeping import Keep
from armillary.models.activation_checkpoint.offload import OffloadedTensors, settle

What = Literal["x", "attended"]
"""A block's input; or what its attention gave, out and lse."""


class Computes(Protocol):
    """A run of a block, to be done again."""

    @property
    def block(self) -> Any: ...

    def again(self) -> Computes: ...

    def rest(self, x: Tensor, out: Tensor, into: Tensor | None) -> Tensor: ...

    def attend(self, x: Tensor) -> tuple[Tensor, Tensor]: ...


@runtime_checkable
class Gathers(Protocol):
    """A block whose parameters FSDP2 gathers."""

    def unshard(self) -> Any: ...

    def reshard(self) -> None: ...


class Kept(Protocol):
    """Tensors that are there when asked for."""

    def take(self) -> Sequence[Tensor]: ...


class OnDevice:
    """Tensors that stay where they are."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors

    def take(self) -> Sequence[Tensor]:
        return self.tensors


class SavedByAutograd:
    """Tensors `rows` of what a node of autograd's has saved, which notices if they are changed. Keeps no node alive."""

    def __init__(self, ctx: Any, rows: slice) -> None:
        self.ctx, self.rows = ref(ctx), rows

    def take(self) -> Sequence[Tensor]:
        return self.ctx().saved_tensors[self.rows]  # pyright: ignore[reportOptionalMemberAccess]


class Checkpoint:
    """One run of a block.

    Args:
        work: what it computes.
        keep: what of it is kept.
        autocast: a context in which autocast is as it was in forward.
        below: of the block before this one.
    """

    def __init__(
        self, work: Computes, keep: Keep, autocast: Callable[[], AbstractContextManager[Any]], below: Checkpoint | None
    ) -> None:
        self.work, self.keep, self.autocast, self.below = work, keep, autocast, below
        self.kept: dict[tuple[What, ...], Kept] = {}
        self.made_again: dict[tuple[What, ...], Kept] = {}
        self._result: tuple[ref[torch.UntypedStorage], int] | None = None

    # -- forward ------------------------------------------------------------------------------------------------------

    def gave(self, y: Tensor) -> None:
        """Takes down the block's result, without keeping it."""
        self._result = ref(y.untyped_storage()), y._version

    def is_result(self, x: Tensor) -> bool:
        """Whether x is this block's result, as it was given: not what a hook has made of it."""
        if self._result is None:
            return False
        storage, version = self._result
        return storage() is x.untyped_storage() and version == x._version

    def store(self, ctx: Any, parameters: Sequence[Tensor], x: Tensor, attended: Sequence[Tensor]) -> None:
        """Keeps what is to be kept, on the device by autograd, which notices if that or a parameter is changed."""
        wanted: tuple[What, ...] = (*(("x",) if self.keep.x else ()), *(("attended",) if self.keep.attended else ()))
        tensors = [*((x,) if self.keep.x else ()), *(attended if self.keep.attended else ())]
        settle(x.device)
        if wanted and self.keep.host:
            self.kept[wanted] = OffloadedTensors(tensors)
        elif wanted:
            self.kept[wanted] = SavedByAutograd(ctx, slice(len(parameters), None))
        ctx.save_for_backward(*parameters, *([] if self.keep.host else tensors))

    # -- backward -----------------------------------------------------------------------------------------------------

    def recall(self) -> tuple[Tensor, Tensor, Tensor]:
        """x, out and lse: kept, or computed again."""
        x = None if self._has("x") else self._from_below(stays=True)
        found = self._take()
        x = found["x"][0] if x is None else x
        out, lse = found.get("attended") or self.work.again().attend(x)
        return x, out, lse

    def result(self, stays: bool) -> Tensor:
        """The block's result, computed again. What that took is kept until the block is differentiated.

        Args:
            stays: its parameters, which FSDP2 gathers, are needed next.
        """
        made: dict[What, Sequence[Tensor]] = {} if self._has("x") else {"x": (self._from_below(stays=False),)}
        found = {**self._take(), **made}
        (x,) = found["x"]
        with gathered(self.work.block, stays), self.autocast():
            if "attended" not in found:
                made["attended"] = found["attended"] = self.work.again().attend(x)
            if made:
                tensors = [tensor for each in made.values() for tensor in each]
                self.made_again[tuple(made)] = OffloadedTensors(tensors) if self.keep.host else OnDevice(tensors)
            y = self.work.again().rest(x, found["attended"][0], None)
        for kept in self.made_again.values():
            if isinstance(kept, OffloadedTensors):
                kept.settle()  # the block above is differentiated next, which holds most
        return y

    def fetch(self) -> None:
        """Starts bringing back what is on the host, if nobody has."""
        for kept in (*self.kept.values(), *self.made_again.values()):
            if isinstance(kept, OffloadedTensors):
                kept.fetch()

    def fetch_below(self) -> None:
        """Likewise, what the block before has there."""
        if self.below is not None:
            self.below.fetch()

    def finish(self) -> None:
        """The block has been differentiated."""
        self.fetch_below()
        self.made_again.clear()
        if not compat.keeps_graph():
            self.kept.clear()
            self.below = None

    def _from_below(self, stays: bool) -> Tensor:
        assert self.below is not None  # or x would have been kept
        return self.below.result(stays)

    def _has(self, what: What) -> bool:
        return any(what in several for several in (*self.kept, *self.made_again))

    def _take(self) -> dict[What, Sequence[Tensor]]:
        """All that there is, on the device."""
        found: dict[What, Sequence[Tensor]] = {}
        for several, kept in (self.kept | self.made_again).items():
            tensors = kept.take()
            found |= {what: tensors[:1] if what == "x" else tensors[-2:] for what in several}
        return found


@contextmanager
def gathered(block: Any, stays: bool) -> Generator[None]:
    """Around work with a block's parameters, outside of its own forward and backward; under FSDP2 they are gathered.

    Args:
        stays: they remain so; the block's backward, which comes next, gives them back.
    """
    if not isinstance(block, Gathers):
        yield
        return
    block.unshard()
    yield
    if not stays:
        block.reshard()
