"""The conformance suite of attention methods: every result against a float64 oracle.

    def on_every_rank() -> None:
        attend = MyMethod(mesh(ring=4)["ring"])
        for case in cases():
            check(attend, case)

    def test_my_method(worlds):
        worlds(4).run(on_every_rank)

Every rank builds the same global tensors from the case's seed, and runs the method on its own shard, forward and
backward. The shards of all ranks are joined and compared with float64 attention on one device, for a random gradient
`dout` of out. The error of a tensor is relative to the tensor's norm. Uninitialized memory is filled with NaN, inputs
may be strided views, another call runs between forward and backward, and a second run must give the same bits.

    python -m conformance --ranks 1 2 4 8 --method all     # the full product of methods and cases
    python -m conformance --random 2000 --seed 1           # random cases

Random cases have strides, autocast, checkpointing, torch.compile, DTensors, projections, any layout and mask, on 1 to 8
ranks.
"""

from conformance.calling import ConformingMethod
from conformance.case import GRADIENTS, KINDS, LAYOUTS, MEMORY, SAVING, Case
from conformance.check import attend_nothing, check, errors
from conformance.compositions import METHODS, Composition, compositions
from conformance.draw import Trial, drawn
from conformance.limits import FLASH_FACTOR, LIMITS, LSE_LIMIT, ErrorAndLimit
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
    "ErrorAndLimit",
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
