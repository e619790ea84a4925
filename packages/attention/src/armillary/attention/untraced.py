"""What `torch.compile` leaves out of its graphs. Imported where something is compiled: the compiler takes seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, cast

import torch
from torch import Tensor

from armillary.attention.projections import Projections
from armillary.attention.spec import AttentionOptions, AttentionSpec


class ProjectsInStages(Protocol):
    """Of a method (`methods/base.py`), what a call on hidden states needs."""

    def check_projected(
        self, x: Tensor, projections: Projections, sinks: Tensor | None, options: AttentionOptions
    ) -> AttentionSpec: ...

    def project(self, x: Tensor, projections: Projections, spec: AttentionSpec, sinks: Tensor | None) -> Tensor: ...


def _project(
    method: ProjectsInStages, x: Tensor, projections: Projections, sinks: Tensor | None, options: AttentionOptions
) -> Tensor:
    return method.project(x, projections, method.check_projected(x, projections, sinks, options), sinks)


WHY = "autograd projects stages of heads again in backward"
project_untraced = cast(Callable[..., Tensor], torch.compiler.disable(_project, reason=WHY))
"""`Method.projected`, where the graph breaks."""
