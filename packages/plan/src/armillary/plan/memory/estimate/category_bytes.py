"""`CategoryBytes`: sums of bytes by category."""

from __future__ import annotations


class CategoryBytes(dict[str, float]):
    """Bytes by category: `CategoryBytes(attention=a, mlp=b) + CategoryBytes(mlp=c)` adds per category."""

    def __add__(self, other: CategoryBytes) -> CategoryBytes:
        total = CategoryBytes(self)
        for category, size in other.items():
            total[category] = total.get(category, 0) + size
        return total

    def times(self, n: float) -> CategoryBytes:
        """Returns these bytes times `n`."""
        return CategoryBytes({category: n * size for category, size in self.items()})

    def round(self) -> dict[str, int]:
        """Returns bytes rounded to integers, the largest category first, without empty categories."""
        sizes = sorted(((round(size), category) for category, size in self.items()), reverse=True)
        return {category: size for size, category in sizes if size}
