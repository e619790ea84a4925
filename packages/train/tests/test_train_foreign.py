"""External files nested more deeply than Python's recursion limit raise a one-line ValueError."""

import pytest

from armillary.core.files import parse_json, parse_toml
from armillary.data import open_store
from armillary.data.formats.folder import Header
from armillary.data.prepare.sources import _is_dataset
from armillary.data.text.tokenizer_json import parse_definition, read_name
from armillary.models.hub.folder import read_json
from armillary.train.config.overlay import read_settings
from armillary.train.reporting import journal

JSON, TOML = "[" * 100_000, "a = " + "[" * 100_000


def test_deeply_nested_text_raises_a_value_error():
    for parse, text in ((parse_json, JSON), (parse_json, JSON.encode()), (parse_toml, TOML)):
        with pytest.raises(ValueError, match="nested too deeply"):
            parse(text)
    assert parse_json(b"[1]") == [1] and parse_toml("a = 1") == {"a": 1}


def test_every_reader_refuses_a_deeply_nested_file(tmp_path):
    for name in ("config.json", "store.json", "tokenizer_config.json", "dataset_dict.json", "metrics.jsonl"):
        (tmp_path / name).write_text(JSON)
    (tmp_path / "run.toml").write_text(TOML)
    readers = [
        lambda: read_settings(tmp_path / "config.json"),
        lambda: read_settings(tmp_path / "run.toml"),
        lambda: read_json(tmp_path / "config.json"),
        lambda: Header.read(tmp_path),
        lambda: open_store(tmp_path),
        lambda: parse_definition(JSON.encode()),
        lambda: read_name(tmp_path / "tokenizer_config.json", "eos_token"),
        lambda: _is_dataset(tmp_path),
    ]
    for read in readers:
        with pytest.raises(ValueError) as error:
            read()
        assert "\n" not in str(error.value)
    assert list(journal.read(tmp_path / "metrics.jsonl")) == []
