"""The suite that every attention method goes through, ours or yours.

    def on_every_rank() -> None:
        attend = MyMethod(mesh(ring=4)["ring"])
        for case in cases():
            check(attend, case)

    def test_my_method(worlds):
        worlds(4).run(on_every_rank)

Every rank builds the same global tensors from the case's seed, runs the method on its own shard, forward and backward,
and compares with the float64 oracle: random dout, each gradient against its own size, in the dtype that went in. Memory
that nobody wrote holds NaN, inputs may be strided views, another call comes between forward and backward, and a second
run must give the same bits.

All of it, for the methods of this package: `python -m armillary.attention.conformance --ranks 1 2 4 8 --method all`.
"""

from armillary.attention.conformance.case import (
    DTYPES,
    HEADS,
    KEYS,
    KINDS,
    LENGTHS,
    MASKS,
    MEMORY,
    Case,
    cases,
    product_cases,
    random_cases,
)
from armillary.attention.conformance.check import Method, check, errors
from armillary.attention.conformance.compositions import METHODS, Composition, compositions
from armillary.attention.conformance.expected import FLASH_FACTOR, LIMITS, LSE_LIMIT

__all__ = [
    "DTYPES",
    "FLASH_FACTOR",
    "HEADS",
    "KEYS",
    "KINDS",
    "LENGTHS",
    "LIMITS",
    "LSE_LIMIT",
    "MASKS",
    "MEMORY",
    "METHODS",
    "Case",
    "Composition",
    "Method",
    "cases",
    "check",
    "compositions",
    "errors",
    "product_cases",
    "random_cases",
]
