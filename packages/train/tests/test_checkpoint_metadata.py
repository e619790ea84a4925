"""DCP's `.metadata` as data: read whatever Python wrote it, and every name, size and range in it is checked."""

import io
import pickle
import shutil
from dataclasses import replace
from enum import Enum
from pathlib import PurePosixPath

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
)

from armillary.train.runtime.checkpoint.metadata import GLOBALS, METADATA, Damaged, check_files, read_metadata
from armillary.train.runtime.checkpoint.reader import read_tensors

TENSORS = {
    "a": torch.arange(16.0).reshape(4, 4),
    "b": torch.arange(3).to(torch.bfloat16),
    "c": torch.tensor(7),
    "d": torch.empty(0, 2),
}


class Attribute:
    """`getattr` of these arguments, in a pickle."""

    def __init__(self, *arguments) -> None:
        self.arguments = arguments


class Python3112(pickle.Pickler):
    """Pickles members of enums as Python 3.11.0 to 3.11.3 do, byte for byte."""

    def reducer_override(self, obj):
        if isinstance(obj, Attribute):
            return getattr, obj.arguments
        return (getattr, (type(obj), obj.name)) if isinstance(obj, Enum) else NotImplemented


def as_python_3112(value) -> bytes:
    file = io.BytesIO()
    Python3112(file, pickle.DEFAULT_PROTOCOL).dump(value)
    return file.getvalue()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of `TENSORS` as torch writes it; not to be changed."""
    folder = tmp_path_factory.mktemp("saved")
    dcp.save({"model": TENSORS}, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    """A copy of that checkpoint."""
    return shutil.copytree(saved, tmp_path / "copy")


def metadata_of(folder) -> Metadata:
    return dcp.FileSystemReader(folder).read_metadata()


def refused(folder) -> str:
    """The reason why the metadata in a folder is refused."""
    with pytest.raises(Damaged, match=r"^\.metadata ") as error:
        read_metadata(folder)
    assert "\n" not in str(error.value)
    return str(error.value)


def same(tensors) -> bool:
    return tensors.keys() == TENSORS.keys() and all(torch.equal(tensors[name], TENSORS[name]) for name in TENSORS)


def test_metadata_with_enums_by_name_is_read(folder):
    content = as_python_3112(metadata_of(folder))
    assert b"getattr" in content
    (folder / METADATA).write_bytes(content)
    assert same(read_tensors(folder, "model"))


MEMBER = _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
ATTRIBUTES = [
    (_MEM_FORMAT_ENCODING, "__class__"),
    (_MEM_FORMAT_ENCODING, "__members__"),
    (_MEM_FORMAT_ENCODING, "_member_map_"),
    (_MEM_FORMAT_ENCODING, "mro"),
    (_MEM_FORMAT_ENCODING, "torch_contiguous_format"),
    (_MEM_FORMAT_ENCODING, b"TORCH_CONTIGUOUS_FORMAT"),
    (_MEM_FORMAT_ENCODING, ["TORCH_CONTIGUOUS_FORMAT"]),
    (_MEM_FORMAT_ENCODING,),
    (_MEM_FORMAT_ENCODING, MEMBER.name, None),
    (MEMBER.name, _MEM_FORMAT_ENCODING),
    (),
    (MEMBER, "name"),
    (MEMBER, MEMBER.name),
    (Attribute(_MEM_FORMAT_ENCODING, MEMBER.name), "__class__"),
    (Attribute(_MEM_FORMAT_ENCODING, "__class__"), "__call__"),
    (getattr, "__self__"),
    (getattr, MEMBER.name),
    (Metadata, MEMBER.name),
    (torch.Size, "__new__"),
    (torch.float32, "itemsize"),
    (PurePosixPath("/"), "parent"),
    ("text", "format"),
]


@pytest.mark.parametrize("arguments", ATTRIBUTES, ids=range(len(ATTRIBUTES)))
def test_no_other_attribute_is_looked_up(folder, arguments):
    """In a field that is not used otherwise: what is read of it makes no difference."""
    for attribute, readable in [((_MEM_FORMAT_ENCODING, MEMBER.name), True), (arguments, False)]:
        metadata = replace(metadata_of(folder), planner_data=Attribute(*attribute))
        (folder / METADATA).write_bytes(as_python_3112(metadata))
        if readable:
            assert read_metadata(folder).state_dict_metadata.keys() == {f"model.{name}" for name in TENSORS}
        else:
            refused(folder)


PICKLES = [
    b"cos\nsystem\n(S'true'\ntR.",
    b"cbuiltins\neval\n(S'1'\ntR.",
    b"ctorch\nload\n(S'x'\ntR.",
    b"ctorch.hub\nload\n.",
    b"cbuiltins\ngetattr\n.",
    b"cpathlib\nPosixPath.unlink\n.",
    b"\x80\x04\x8c\x05torch\x8c\x0cSize.__new__\x93.",
    b"\x80\x04\x82\x01.",  # an extension
    b"P1\n.",  # a persistent id
    b"",
    b"N.",
    pickle.dumps({"state_dict_metadata": {}}),
    # A state for the class, not for an object of it: its items would become attributes of the class.
    b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n(N}X\x07\x00\x00\x00versionK\x01stb.",
    b"\x80\x02ctorch\nSize\n(N}X\x01\x00\x00\x00xK\x01stb.",
    b"\x80\x02cbuiltins\ngetattr\n(N}X\x09\x00\x00\x00ARGUMENTSK\x01stb.",
    b"\x80\x02cbuiltins\ngetattr\n}X\x09\x00\x00\x00ARGUMENTSK\x01sb.",
]


@pytest.mark.parametrize("content", PICKLES, ids=range(len(PICKLES)))
def test_metadata_names_nothing_but_what_dcp_needs(tmp_path, content):
    before = [dict(vars(kind)) for kind in GLOBALS.values() if isinstance(kind, type)]
    (tmp_path / METADATA).write_bytes(content)
    refused(tmp_path)
    assert [dict(vars(kind)) for kind in GLOBALS.values() if isinstance(kind, type)] == before


def chunks(*places):
    """Other chunks of the tensor "a", stored where its own is."""

    def change(metadata):
        entry, storage = metadata.state_dict_metadata["model.a"], metadata.storage_data
        info = storage[MetadataIndex("model.a", (0, 0))]
        entry.chunks[:] = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in places]
        storage |= {MetadataIndex("model.a", offsets): info for offsets, _ in places}

    return change


def sized(*size):
    """Another size of the tensor "a", in one chunk."""

    def change(metadata):
        chunks(((0,) * len(size), size))(metadata)
        metadata.state_dict_metadata["model.a"].size = torch.Size(size)

    return change


def stored(**fields):
    """Another place of all tensors."""

    def change(metadata):
        for index, info in metadata.storage_data.items():
            metadata.storage_data[index] = replace(info, **fields)

    return change


WRONG = [
    (chunks(), "model.a"),
    (chunks(((0, 0), (2, 4))), "model.a"),
    (chunks(((2, 2), (4, 4))), "model.a"),
    (chunks(((0,), (4,))), ""),
    (chunks(((0, 0), (4, 4)), ((1, 0), (3, 4))), "model.a"),
    (sized(2**40, 2**10), "model.a"),
    (sized(2**62, 2**62), "model.a"),
    (sized(2**70), str(2**70)),
    (sized(-1, -16), "-16"),
    (stored(length=2**70), str(2**70)),
    (stored(length=-1), "-1"),
    (stored(offset=-1), "-1"),
    (stored(length=1), "model."),
    (stored(length=2.0), "float"),
    (stored(relative_path=""), "relative_path=''"),
    (stored(relative_path="."), "relative_path='.'"),
    (stored(relative_path=".."), "relative_path='..'"),
    (stored(relative_path="a/b"), "relative_path='a/b'"),
    (stored(relative_path="/etc/passwd"), "relative_path='/etc/passwd'"),
    (stored(relative_path="a\0"), r"relative_path='a\x00'"),
    (stored(relative_path=7), "int"),
    (stored(transform_descriptors=["zstd"]), "transform_descriptors=['zstd']"),
    (lambda metadata: metadata.storage_data.clear(), "model."),
]


@pytest.mark.parametrize("change, named", WRONG, ids=range(len(WRONG)))
def test_sizes_and_places_that_cannot_be_are_refused(folder, change, named):
    metadata = metadata_of(folder)
    change(metadata)
    (folder / METADATA).write_bytes(pickle.dumps(metadata))
    assert named in refused(folder)


@pytest.mark.parametrize(
    "change",
    [
        stored(relative_path="absent"),
        stored(length=2**40),
        stored(offset=2**40),
        stored(offset=0, length=5000),  # in range one by one, and in the same bytes
    ],
)
def test_bytes_that_files_do_not_have_are_refused_before_memory_is_taken(folder, change):
    metadata = metadata_of(folder)
    change(metadata)
    (folder / METADATA).write_bytes(pickle.dumps(metadata))
    file = next(folder.glob("*.distcp"))
    assert 5000 < file.stat().st_size < 20000
    with pytest.raises(Damaged, match=r"\.metadata .* (absent|" + file.name + ")"):
        check_files(folder, read_metadata(folder))
    with pytest.raises(Damaged):
        read_tensors(folder, "model")


def test_a_tensor_that_is_there_and_larger_than_memory_is_named(folder):
    """In a file with a hole, which takes no room on disk."""
    metadata, length = metadata_of(folder), 2**42
    sized(length // 4)(metadata)
    metadata.storage_data[MetadataIndex("model.a", (0,))] = _StorageInfo("sparse", 0, length)
    (folder / METADATA).write_bytes(pickle.dumps(metadata))
    with (folder / "sparse").open("wb") as file:
        file.truncate(length)
    with pytest.raises(ValueError, match=r"no memory for a \("):
        read_tensors(folder, "model")
