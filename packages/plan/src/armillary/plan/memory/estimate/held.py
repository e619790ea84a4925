"""Bytes by what they are for."""

from __future__ import annotations


class Held(dict[str, float]):
    """Bytes by category, as in `Held(attention=a, mlp=b) + Held(mlp=c)`."""

    def __add__(self, other: Held) -> Held:
        return Held({category: self.get(category, 0) + other.get(category, 0) for category in (*self, *other)})

    def times(self, n: float) -> Held:
        """n of these."""
        return Held({category: n * size for category, size in self.items()})

    def whole(self) -> dict[str, int]:
        """Whole bytes, largest first; nothing that is nothing."""
        sizes = sorted(((round(size), category) for category, size in self.items()), reverse=True)
        return {category: size for size, category in sizes if size}
