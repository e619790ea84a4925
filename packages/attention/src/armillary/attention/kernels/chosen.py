"""Which kernel runs on a kind of device, and why not another, in words."""

from __future__ import annotations

from dataclasses import dataclass

from armillary.attention.kernels.choice import KERNELS, choose_kernel, rulings
from armillary.attention.kernels.inputs import Inputs
from armillary.attention.kernels.limits import FAMILIES


@dataclass(frozen=True)
class ChosenKernel:
    """The kernel on one kind of device.

    Args:
        device: for people.
        name: of the kernel; None: what was asked for by name is refused there.
        others: why not those that would stand before it, or why what was asked for is refused.
    """

    device: str
    name: str | None
    others: dict[str, str]


def chosen(inputs: Inputs, wanted: str | None) -> ChosenKernel:
    """The kernel for these inputs, and why not a better one."""
    where = inputs.device
    if inputs.capability is not None:
        number = ".".join(map(str, inputs.capability))
        where = f"compute capability {number} ({FAMILIES.get(inputs.capability[0], 'newer')})"
    found = [each for each in rulings(inputs) if each.kernel.limits.device in (None, inputs.device)]
    if wanted is not None:
        refused = next((each.refused for each in found if each.kernel.name == wanted), "of another device")
        return ChosenKernel(where, wanted if refused is None else None, {wanted: refused} if refused else {})
    name = choose_kernel(inputs).name
    before = found[: [each.kernel.name for each in found].index(name)]
    return ChosenKernel(where, name, {each.kernel.name: each.why_not for each in before})


def check_kernel_name(flag: str, name: str | None) -> None:
    """Refuses what is no kernel's name, nor None.

    Raises:
        ValueError: names the flag, and all kernels.
    """
    names = [kernel.name for kernel in KERNELS]
    if name not in (None, *names):
        raise ValueError(f"{flag} {name}: known are {', '.join(names)}")
