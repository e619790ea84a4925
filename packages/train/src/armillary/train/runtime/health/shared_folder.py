"""Checks that all ranks of a run see the same folder."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

from armillary.train.runtime.health.ranks import Ranks


def check_shared(folder: Path, ranks: Ranks, flag: str) -> None:
    """Creates the folder if it does not exist, and checks that it is the same one for all ranks. Collective.

    Args:
        flag: the setting of the folder, for messages.

    Raises:
        ValueError: names the ranks that do not see a file of rank 0; on every rank.
    """

    # Rank 0 creates a file with a name that no earlier run has used; the other ranks look for it.
    def create_token() -> str:
        folder.mkdir(parents=True, exist_ok=True)
        token = f".seen-by-all-{uuid4().hex}"
        (folder / token).touch()
        return token

    token = ranks.on_first(create_token)
    blind = [rank for rank, sees_it in enumerate(ranks.agree((folder / token).exists)) if not sees_it]
    ranks.on_first((folder / token).unlink)
    if blind:
        raise ValueError(
            f"{folder} is not the same folder for all ranks: what rank 0 writes there is not seen by "
            f"{', '.join(map(str, blind))}; let {flag} lie on a file system that all hosts share"
        )
