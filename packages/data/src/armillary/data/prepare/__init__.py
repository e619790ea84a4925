"""Preparation of token stores from text: `armillary-data prepare`."""

from armillary.data.prepare.preparation import Preparation, Progress, prepare

__all__ = ["Preparation", "Progress", "prepare"]
