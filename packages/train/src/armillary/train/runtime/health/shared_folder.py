"""Checks that all ranks of a run see the same folder."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

from armillary.train.runtime.health.ranks import Ranks


def check_shared(folder: Path, ranks: Ranks, flag: str) -> None:
    """Creates the folder if it does not exist, and checks that all ranks see the same folder. Collective.

    Args:
        flag: the flag that sets the folder, for messages.

    Raises:
        ValueError: ranks do not see a file that rank 0 created; the message names them. On every rank.
        OSError: rank 0 cannot create a file in the folder. On every rank.
    """

    # Rank 0 creates a file with a name that no earlier run has used; the other ranks look for it.
    def create_token() -> str:
        folder.mkdir(parents=True, exist_ok=True)
        token = f".seen-by-all-{uuid4().hex}"
        (folder / token).touch()
        return token

    token = ranks.on_first(create_token)
    blind = [rank for rank, sees_it in enumerate(ranks.on_all((folder / token).exists)) if not sees_it]
    ranks.on_first((folder / token).unlink)
    if blind:
        raise ValueError(
            f"{folder} is not the same folder for all ranks: a file of rank 0 is not seen by rank "
            f"{', '.join(map(str, blind))}; choose a {flag} on a file system that all hosts share"
        )
