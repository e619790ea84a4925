"""The suite that every attention method goes through, ours or yours.

    def on_every_rank() -> None:
        attend = MyMethod(mesh(ring=4)["ring"])
        for case in cases():
            check(attend, case)

    def test_my_method(worlds):
        worlds(4).run(on_every_rank)

Every rank builds the same global tensors from the case's seed, and runs the method on its own shard, forward and
backward. What the ranks have is put together, and compared with the float64 oracle: random dout, each whole tensor
against its own norm, in the dtype that went in. Memory that nobody wrote holds NaN, inputs may be strided views,
another call comes between forward and backward, and a second run must give the same bits.

All of it, for the methods of this package: `python -m conformance --ranks 1 2 4 8 --method all`.
A search among what else users do (strides, autocast, checkpointing, torch.compile, DTensors, projections, any layout
and any mask), on 1 to 8 ranks: `python -m conformance --random 2000 --seed 1`.
"""

from conformance.calling import ConformingMethod
from conformance.case import GRADIENTS, KINDS, LAYOUTS, MEMORY, SAVING, Case
from conformance.check import attend_nothing, check, errors
from conformance.compositions import METHODS, Composition, compositions
from conformance.draw import Trial, drawn
from conformance.limits import FLASH_FACTOR, LIMITS, LSE_LIMIT, Off
from conformance.sample import DTYPES, HEADS, KEYS, LENGTHS, cases, product_cases
from conformance.sample_masks import MASKS, with_every_kind

__all__ = [
    "DTYPES",
    "FLASH_FACTOR",
    "GRADIENTS",
    "HEADS",
    "KEYS",
    "KINDS",
    "LAYOUTS",
    "LENGTHS",
    "LIMITS",
    "LSE_LIMIT",
    "MASKS",
    "MEMORY",
    "METHODS",
    "SAVING",
    "Case",
    "Composition",
    "ConformingMethod",
    "Off",
    "Trial",
    "attend_nothing",
    "cases",
    "check",
    "compositions",
    "drawn",
    "errors",
    "product_cases",
    "with_every_kind",
]
