"""Reading and writing of safetensors files, for weights and for checkpoints.

A file contains, in order: the length of a JSON text (8 bytes), the text, and the data of all tensors. The text has the
dtype, shape and position of each tensor, and texts under "__metadata__".
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from safetensors import safe_open
from torch import Tensor

from armillary.core.internal import file_size
from armillary.models.parameter_shards import Box

# Data types by their names in files. No others are read or written.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
# Data types that weights may have.
FLOATS = {name: dtype for name, dtype in DTYPES.items() if dtype.is_floating_point}

SUFFIX = ".safetensors"


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of an open file, as its header describes it: name in the file, shape, and name of the dtype."""

    file: Any
    key: str
    shape: tuple[int, ...]
    dtype: str

    def read(self, box: Box) -> Tensor:
        """Reads a box of the tensor; the result may be a view of the mapped file. Only this method reads data."""
        return cast(Tensor, self.file.get_slice(self.key)[box])


def open_tensors(path: Path, stack: ExitStack) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Opens a file; returns its tensors by name, and the texts of its metadata. Reads the header only.

    Args:
        stack: closes the file.

    Raises:
        OSError: the file cannot be opened, or is a FIFO or a device.
        SafetensorError: the header is invalid, or does not fit the file's size.
        MemoryError: the file cannot be mapped into memory.
    """
    file_size(path)  # raises for a FIFO or a device, which `safe_open` would wait for
    try:
        file: Any = stack.enter_context(safe_open(path, framework="pt"))
    except RuntimeError as error:  # from torch, which maps the file
        raise MemoryError(f"{path.name}: {error}") from error
    entries: dict[str, TensorEntry] = {}
    for key in cast(Iterable[str], file.keys()):
        header = file.get_slice(key)
        entries[key] = TensorEntry(file, key, tuple(header.get_shape()), header.get_dtype())
    return entries, file.metadata() or {}


def tensor_bytes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    """Yields a file's content: the header, and then the bytes of each tensor. Copies one tensor to the host at a time.

    Tensors with the largest elements come first, then by name: float64 before float32 before bfloat16. So each tensor
    begins at a multiple of its element size, as it must in a file that is mapped into memory.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    dtype_names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    start = 0
    for name in names:
        tensor = tensors[name]
        end = start + tensor.nbytes
        header[name] = {
            "dtype": dtype_names[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the first tensor
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        # Viewed as uint8, because numpy has no bfloat16.
        flat: Any = tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        yield memoryview(flat.numpy())


class Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


def split(tensors: Mapping[str, Sized], max_file_bytes: int) -> list[list[str]]:
    """Divides tensors into files as `transformers` does: in order, and a tensor above the limit has its own file."""
    groups: list[list[str]] = []
    current: list[str] = []
    current_bytes = 0
    for name, tensor in tensors.items():
        if tensor.nbytes > max_file_bytes:
            groups.append([name])
            continue
        if current_bytes + tensor.nbytes > max_file_bytes:
            groups.append(current)
            current, current_bytes = [], 0
        current.append(name)
        current_bytes += tensor.nbytes
    return [*groups, current] if current else groups
