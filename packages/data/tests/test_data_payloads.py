"""Opening, verifying and reading a store runs no pickle in any of its files."""

import json
import pickle
import shutil
import struct

import pytest
from data_stores import documents_of, write_folder

from armillary.data import open_store, verify_folder

DOCUMENTS = [[1, 2, 3, 4], [5, 6, 7]]


class Payload:
    """An object whose unpickling creates a file."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return open, (str(self.marker), "w")


def token_folder(path):
    folder = write_folder(path, DOCUMENTS)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text("{}")


def megatron(path):
    path.mkdir()
    (path / "text.bin").write_bytes(bytes(8))
    # Version 1, uint16, one document of one sequence with 4 tokens at byte 0.
    (path / "text.idx").write_bytes(b"MMIDIDX\x00\x00" + struct.pack("<QBQQiqqq", 1, 8, 1, 2, 4, 0, 0, 1))


def arrow(path):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({"input_ids": DOCUMENTS}).save_to_disk(path)


def read_all(path):
    store = open_store(path / "text" if (path / "text.idx").exists() else path)
    if (path / "store.json").exists():
        list(verify_folder(path))
    return documents_of(store)


@pytest.mark.parametrize("make", [token_folder, megatron, arrow])
def test_a_payload_in_a_file_of_a_store_is_not_run(tmp_path, make):
    make(tmp_path / "whole")
    assert sum(map(len, read_all(tmp_path / "whole"))) in (4, 7)
    marker = tmp_path / "executed"
    names = sorted(path.name for path in (tmp_path / "whole").iterdir())
    for name in [*names, "state.pkl", "dataset.py"]:
        folder = tmp_path / f"with {name}"
        shutil.copytree(tmp_path / "whole", folder)
        content = f"open({str(marker)!r}, 'w')".encode() if name == "dataset.py" else pickle.dumps(Payload(marker))
        (folder / name).write_bytes(content)
        try:
            read_all(folder)
        except (ValueError, IndexError) as error:
            assert "\n" not in str(error), name
        assert not marker.exists(), name


def test_features_of_a_saved_dataset_cannot_name_functions(tmp_path):
    arrow(tmp_path / "saved")
    path, marker = tmp_path / "saved/dataset_info.json", tmp_path / "executed"
    info = json.loads(path.read_text())
    info["features"]["input_ids"] = {"_type": "open", "file": str(marker), "mode": "w"}
    path.write_text(json.dumps(info))
    with pytest.raises(ValueError):
        open_store(tmp_path / "saved")
    assert not marker.exists()
