from recovery import undisturbed

from armillary.core.testing.plugin import no_group_left, worlds

__all__ = ["no_group_left", "undisturbed", "worlds"]
