"""From text to a token store: `armillary-data prepare`."""

from armillary.data.prepare.run import Preparation, Progress, prepare

__all__ = ["Preparation", "Progress", "prepare"]
