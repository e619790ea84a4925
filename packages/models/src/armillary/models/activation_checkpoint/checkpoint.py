"""The checkpoint of one run of a block: keeps some tensors for its backward, and recomputes the others from them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, Protocol, runtime_checkable
from weakref import ref

import torch
from torch import Tensor

from armillary.core import compat
from armillary.models.activation_checkpoint.block_run import BlockRun
from armillary.models.activation_checkpoint.offload import OffloadedTensors, finish_latest_copy

TensorName = Literal["x", "attention_output"]
"""A block's input; or its attention's output, out and lse."""


@runtime_checkable
class Gathers(Protocol):
    """A block whose parameters FSDP2 gathers."""

    def unshard(self) -> Any: ...

    def reshard(self) -> None: ...


class StoredTensors(Protocol):
    """Tensors kept on the device, on the host, or by autograd; `take` returns them on the device."""

    def take(self) -> Sequence[Tensor]: ...


class OnDevice:
    """Tensors that stay on the device."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors

    def take(self) -> Sequence[Tensor]:
        return self.tensors


class SavedByAutograd:
    """The tensors `rows` of an autograd node's saved tensors, which detects changes to them. Keeps no node alive."""

    def __init__(self, ctx: Any, rows: slice) -> None:
        self.ctx, self.rows = ref(ctx), rows

    def take(self) -> Sequence[Tensor]:
        return self.ctx().saved_tensors[self.rows]  # pyright: ignore[reportOptionalMemberAccess]


class Checkpoint:
    """The tensors that one run of a block keeps for its backward.

    Args:
        block_run: the run, which recomputation repeats.
        autocast: a context that restores forward's autocast.
        previous: the checkpoint of the block below, whose result is this block's x.
    """

    def __init__(
        self,
        block_run: BlockRun,
        autocast: Callable[[], AbstractContextManager[Any]],
        previous: Checkpoint | None,
    ) -> None:
        self.block_run, self.keep, self.autocast, self.previous = block_run, block_run.keep, autocast, previous
        self.stored_tensors: dict[tuple[TensorName, ...], StoredTensors] = {}
        self.recomputed_tensors: dict[tuple[TensorName, ...], StoredTensors] = {}
        # Weak, so that the result is freed as soon as nothing else uses it; the version shows in-place changes.
        self._result: tuple[ref[torch.UntypedStorage], int] | None = None

    # -- forward ------------------------------------------------------------------------------------------------------

    def record_result(self, y: Tensor) -> None:
        """Records the block's result by reference, without keeping it."""
        self._result = ref(y.untyped_storage()), y._version

    def is_result(self, x: Tensor) -> bool:
        """True if x is this block's unchanged result, and not one that a hook replaced."""
        if self._result is None:
            return False
        storage, version = self._result
        return storage() is x.untyped_storage() and version == x._version

    def store(self, ctx: Any, parameters: Sequence[Tensor], x: Tensor, attention_output: Sequence[Tensor]) -> None:
        """Stores the tensors of `keep`; on the device through autograd, which detects in-place changes to them."""
        names: tuple[TensorName, ...] = (
            *(("x",) if self.keep.x else ()),
            *(("attention_output",) if self.keep.attention_output else ()),
        )
        tensors = [*((x,) if self.keep.x else ()), *(attention_output if self.keep.attention_output else ())]
        finish_latest_copy(x.device)  # the previous block's copies have had this block's forward to finish
        if names and self.keep.host:
            self.stored_tensors[names] = OffloadedTensors(tensors)
        elif names:
            self.stored_tensors[names] = SavedByAutograd(ctx, slice(len(parameters), None))
        ctx.save_for_backward(*parameters, *([] if self.keep.host else tensors))

    # -- backward -----------------------------------------------------------------------------------------------------

    def recall(self) -> tuple[Tensor, Sequence[Tensor]]:
        """Returns x, and out and lse if backward needs them: stored or recomputed."""
        # The block below runs backward next, so its parameters stay gathered.
        x = None if self._has("x") else self._previous_result(keep_gathered=True)
        tensors = self._take()
        x = tensors["x"][0] if x is None else x
        if not self.block_run.needs_output:
            return x, ()
        return x, tensors.get("attention_output") or self.block_run.replay().attend(x)

    def result(self, keep_gathered: bool) -> Tensor:
        """Recomputes the block's result. Keeps recomputed inputs and attention outputs for the block's backward.

        Args:
            keep_gathered: leaves its parameters gathered under FSDP2, since they are needed next.
        """
        # 1. x: stored, or the result of the block below, which recurses down to the block that stored its x.
        new_tensors: dict[TensorName, Sequence[Tensor]] = (
            {} if self._has("x") else {"x": (self._previous_result(keep_gathered=False),)}
        )
        tensors_by_name = {**self._take(), **new_tensors}
        (x,) = tensors_by_name["x"]
        with unsharded_parameters(self.block_run.block, keep_gathered), self.autocast():
            # 2. Attention. If backward needs its output, it is kept, so that attention is recomputed only once.
            if "attention_output" not in tensors_by_name:
                tensors_by_name["attention_output"] = self.block_run.replay().attend(x)
                if self.block_run.needs_output:
                    new_tensors["attention_output"] = tensors_by_name["attention_output"]
            if new_tensors:
                tensors = [tensor for group in new_tensors.values() for tensor in group]
                self.recomputed_tensors[tuple(new_tensors)] = (
                    OffloadedTensors(tensors) if self.keep.host else OnDevice(tensors)
                )
            # 3. The token-wise part.
            y = self.block_run.replay().after_attention(x, tensors_by_name["attention_output"][0], None)
        for group in self.recomputed_tensors.values():
            if isinstance(group, OffloadedTensors):
                group.finish_copy()  # frees them before the block above is differentiated, where memory peaks
        return y

    def fetch(self) -> None:
        """Starts to copy offloaded tensors back, unless they are in flight already."""
        for group in (*self.stored_tensors.values(), *self.recomputed_tensors.values()):
            if isinstance(group, OffloadedTensors):
                group.fetch()

    def fetch_previous(self) -> None:
        """Starts to copy back the tensors of the block below."""
        if self.previous is not None:
            self.previous.fetch()

    def finish(self) -> None:
        """Releases everything after the block's backward."""
        self.fetch_previous()
        self.recomputed_tensors.clear()
        if not compat.keeps_graph():  # under retain_graph the next backward needs them again
            self.stored_tensors.clear()
            self.previous = None

    def _previous_result(self, keep_gathered: bool) -> Tensor:
        assert self.previous is not None  # without one, x is stored
        return self.previous.result(keep_gathered)

    def _has(self, name: TensorName) -> bool:
        return any(name in names for names in (*self.stored_tensors, *self.recomputed_tensors))

    def _take(self) -> dict[TensorName, Sequence[Tensor]]:
        """Returns all stored tensors, on the device."""
        # A group has x, or (out, lse), or all three in this order.
        tensors_by_name: dict[TensorName, Sequence[Tensor]] = {}
        for names, group in (self.stored_tensors | self.recomputed_tensors).items():
            tensors = group.take()
            tensors_by_name |= {name: tensors[:1] if name == "x" else tensors[-2:] for name in names}
        return tensors_by_name


@contextmanager
def unsharded_parameters(block: Any, keep_gathered: bool) -> Generator[None]:
    """Context manager that gathers a block's parameters under FSDP2, outside of the block's forward and backward.

    Args:
        keep_gathered: leaves them gathered; the block's backward, which comes next, reshards them.
    """
    if not isinstance(block, Gathers):
        yield
        return
    block.unshard()
    yield
    if not keep_gathered:
        block.reshard()
