"""Models that come from Hugging Face's folders and go there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from armillary.models import hub
from armillary.models.block import AttentionFunction
from armillary.models.parameter_names import plain_name

FREE = ("rope_theta", "rope_scaling", "max_positions", "window", "window_from")
"""What a model may have otherwise than the folder that its weights come from: longer contexts are trained that way."""


class Pretrained(nn.Module):
    """A model that can be read and written; made of its config and, if given, attention."""

    kind: ClassVar[Any]
    """The class of its config."""
    config: Any
    source: Path | None = None
    """The folder that the weights were read from."""

    @classmethod
    def from_pretrained(
        cls,
        folder: str | PathLike[str],
        attention: AttentionFunction | None = None,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """The model in a Hugging Face folder: `config.json` and safetensors, in one file or with an index.

        It is on the CPU, whole, in this process; `load_pretrained` fills a sharded one.

        Args:
            dtype: of the weights; as in the folder unless given.

        Raises:
            ValueError: a missing or broken file, a missing, extra or misshapen tensor, or a config that asks for
                something else than this model computes; names it.
        """
        make: Any = cls
        config = hub.read_config(folder, cls.kind)
        hub.check_weights(Path(folder), config, cls)
        with torch.device("meta"):
            model = make(config, attention)
        shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        model.load_state_dict(hub.read_tensors(folder, model.config, shapes, dtype), assign=True)
        model.source = Path(folder)
        return model

    def save_pretrained(
        self,
        folder: str | PathLike[str],
        source: str | PathLike[str] | None = None,
        dtype: torch.dtype | None = None,
        max_file_bytes: int = hub.MAX_FILE_BYTES,
    ) -> None:
        """Writes `config.json` and safetensors, as `transformers` reads them; makes the folder if need be.

        The tokenizer's files, the generation config and the ids of special tokens are taken from `source`. Other files
        are left alone. Until all is written the old files stay as they are; an error leaves them so.

        A model of `DTensor`s is saved by all ranks of the world together, into a folder that all of them see. Each
        writes some of the files, and holds no more than one of them and one tensor. An error on one is raised on all.

        Args:
            source: by default the folder that the weights were read from, if it is still there.
            dtype: of what is written; as the parameters are unless given.
            max_file_bytes: with more, there are several files and an index.

        Raises:
            ValueError: a parameter without data, a config that no model of `transformers` has, a `source` that is no
                folder.
            OSError: something could not be written.
        """
        if source is None and self.source is not None and self.source.is_dir():
            source = self.source
        hub.save(folder, self.config, named(self), source, dtype, max_file_bytes)


def load_pretrained(model: Pretrained, folder: str | PathLike[str]) -> None:
    """Fills the model's parameters, in place, from a Hugging Face folder; each rank reads the parts that it holds.

    Nothing is communicated. Every rank checks the whole folder first, so that an error is raised on every rank, before
    anything has changed. Numbers are rounded to the parameters' dtype.

    Args:
        model: `Llama` or `GPT`, with plain parameters or `DTensor`s (FSDP2, HSDP, tensor parallelism), after
            `to_empty` if it was built on "meta". It may have another RoPE, window and number of positions than the
            folder's config, for training on longer sequences.

    Raises:
        ValueError: as `from_pretrained`; parameters on "meta"; or a config unlike the model's. Names what differs.
    """
    found, ours = hub.read_config(folder, model.kind), model.config
    names = [field.name for field in fields(ours) if field.name not in FREE]
    differing = [name for name in names if getattr(found, name) != getattr(ours, name)]
    if differing:
        shown = ", ".join(f"{name}={getattr(found, name)} and not {getattr(ours, name)}" for name in differing)
        raise ValueError(f"the config in {folder} is another than the model's: {shown}")
    hub.fill(folder, ours, named(model))
    model.source = Path(folder)


def named(model: nn.Module) -> Mapping[str, Tensor]:
    """Parameters by the names that they have in the unwrapped model.

    As `state_dict` has them: FSDP2 then shards again what a forward pass has left whole, in its compute dtype.
    """
    return {plain_name(name): tensor for name, tensor in model.state_dict().items()}
