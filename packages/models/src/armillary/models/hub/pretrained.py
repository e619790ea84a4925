"""Models that load from Hugging Face folders and save to them."""

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
from armillary.models.parameter_shards import plain_name

# Fields in which a model's config may differ from the folder's, to train the model on longer sequences.
UNCHECKED = ("rope_theta", "rope_scaling", "max_positions", "window", "window_from")


class Pretrained(nn.Module):
    """The base class of `Llama` and `GPT`: a model that loads from a Hugging Face folder and saves to one.

    Subclasses are constructed from a config and, optionally, attention.
    """

    kind: ClassVar[Any]
    """The class of the config."""
    config: Any
    source: Path | None = None
    """The folder from which the weights were loaded."""

    @classmethod
    def from_pretrained(
        cls,
        folder: str | PathLike[str],
        attention: AttentionFunction | None = None,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """Returns the model of a Hugging Face folder: `config.json` and safetensors, in one file or with an index.

        The model is on the CPU and not sharded. For a sharded model use `load_pretrained`.

        Args:
            attention: as in the constructor.
            dtype: dtype of the weights; by default the folder's.

        Raises:
            ValueError: a file is missing or broken, a tensor is missing, unexpected or of another shape, or a field of
                the config has a value that this model does not compute. The error names the file, tensor or field.
        """
        build: Any = cls
        config = hub.read_config(folder, cls.kind)
        # Refuses other weights before a model of the config's sizes is built.
        tensors = hub.read_tensors(Path(folder), config, cls, dtype)
        with torch.device("meta"):
            model = build(config, attention)
        # `assign` replaces the parameters on "meta" by the tensors that were read, without a copy.
        model.load_state_dict(tensors, assign=True)
        model.source = Path(folder)
        return model

    def save_pretrained(
        self,
        folder: str | PathLike[str],
        source: str | PathLike[str] | None = None,
        dtype: torch.dtype | None = None,
        max_file_bytes: int = hub.MAX_FILE_BYTES,
    ) -> None:
        """Writes `config.json` and safetensors, as `transformers` reads them. Creates the folder if it does not exist.

        The tokenizer's files, the generation config and the ids of special tokens are copied from `source`. Old files
        are replaced once all new ones are complete, and kept if there is an error. Other files are not touched.

        For a model of `DTensor`s all ranks of the world must call this, and see the folder. Each rank writes some of
        the files, and has at most one file and one more tensor in memory at a time. An error on one rank is raised on
        all ranks.

        Args:
            source: a Hugging Face folder; by default the one from which the weights were loaded, if it still exists.
            dtype: dtype of the written weights; by default the parameters'.
            max_file_bytes: weights of more bytes are divided into several files, with an index.

        Raises:
            ValueError: a parameter is on "meta", a dtype is not one of `hub.safetensors.FLOATS`, no `model_type` has
                this config, `max_file_bytes` is below 1, or `source` is not a folder or has a broken `config.json`.
            OSError: a file cannot be written, or another rank had an error.
        """
        if source is None and self.source is not None and self.source.is_dir():
            source = self.source
        hub.save(folder, self.config, parameters_by_name(self), source, dtype, max_file_bytes)


def load_pretrained(model: Pretrained, folder: str | PathLike[str]) -> None:
    """Fills the model's parameters in place from a Hugging Face folder. Each rank reads only its own shards.

    There is no communication. Every rank checks the whole folder first, so that all ranks raise the same error before
    anything changes. Values are rounded to the parameters' dtype.

    Args:
        model: `Llama` or `GPT`, with plain parameters or `DTensor`s (FSDP2, HSDP, tensor parallelism), after
            `to_empty` if it was built on "meta". RoPE, window and `max_positions` of a `Llama` may differ from the
            folder's config, so that it can be trained on longer sequences.

    Raises:
        ValueError: as `from_pretrained`; or parameters are on "meta", or the config differs in another field. Then the
            error lists the differences.
    """
    saved_config, config = hub.read_config(folder, model.kind), model.config
    names = [field.name for field in fields(config) if field.name not in UNCHECKED]
    different_names = [name for name in names if getattr(saved_config, name) != getattr(config, name)]
    if different_names:
        pairs = [(name, getattr(saved_config, name), getattr(config, name)) for name in different_names]
        values = ", ".join(f"{name}={saved_value} instead of {value}" for name, saved_value, value in pairs)
        raise ValueError(f"the config in {folder} differs from the model's: {values}")
    hub.fill(Path(folder), config, parameters_by_name(model))
    model.source = Path(folder)


def parameters_by_name(model: nn.Module) -> Mapping[str, Tensor]:
    """Returns the parameters by their names in the unwrapped model."""
    # At `state_dict`, FSDP2 reshards parameters that are still gathered, in the compute dtype, after a forward pass.
    return {plain_name(name): tensor for name, tensor in model.state_dict().items()}
