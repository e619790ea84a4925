"""Methods by the names that people type on a command line: the only name table there is."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from armillary.attention.local import Local
from armillary.attention.method import Method
from armillary.attention.ring import Ring
from armillary.attention.ulysses import Ulysses


def build_attention(name: str, mesh: DeviceMesh) -> Method:
    """The method `name` on the axes of `mesh` (from `build_mesh`).

    Args:
        name: "local", "ring", "ulysses", or "usp" (Ulysses around Ring).

    Raises:
        ValueError: an unknown name, or a method that leaves an axis with more than one rank unused.
    """
    unused = {"local": ("ring", "ulysses"), "ring": ("ulysses",), "ulysses": ("ring",), "usp": ()}
    if name not in unused:
        raise ValueError(f"no attention method {name!r}; known: {', '.join(unused)}")
    for axis in unused[name]:
        if mesh[axis].size() > 1:
            raise ValueError(
                f"{name} would leave axis {axis!r} with {mesh[axis].size()} ranks unused; use usp or {axis}=1"
            )
    if name == "local":
        return Local()
    if name == "ring":
        return Ring(mesh["ring"])
    return Ulysses(mesh["ulysses"], inner=Ring(mesh["ring"]) if name == "usp" else None)
