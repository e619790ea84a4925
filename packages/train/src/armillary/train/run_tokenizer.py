"""The tokenizer of a run, and the files by which an exported folder has it too."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from armillary.core.internal import read_json
from armillary.data import ByteTokenizer, TextTokenizer, is_store
from armillary.data.internal import BEGIN, TwoWayTokenizer, has_tokenizer, read_tokenizer, tokenizer_of
from armillary.models.internal import CONFIG
from armillary.train.config.sections import Config


@dataclass(frozen=True)
class TokenSource:
    """The settings of a run that decide its tokenizer.

    Args:
        pretrained: Hugging Face folder of the model that the run started from.
        paths: stores and text; empty for Python's own text; None if they are unknown.
        task: synthetic task that a run of an earlier version trained on.
    """

    pretrained: Path | None = None
    paths: tuple[Path, ...] | None = None
    task: str | None = None

    @classmethod
    def of(cls, config: Config) -> TokenSource:
        return cls(config.model.pretrained, config.data.path)

    @classmethod
    def read(cls, output: Path) -> TokenSource:
        """Reads the settings from the config.json of a run's output folder; all are unknown if there is none."""
        path = output / CONFIG
        if not path.is_file():
            return cls()
        config = read_json(path)
        data, model = config.get("data") or {}, config.get("model") or {}
        if not isinstance(data, dict) or not isinstance(model, dict):
            raise ValueError(f"{path}: data={data!r} and model={model!r} must be objects")
        values: dict[str, Any] = {**data, "pretrained": model.get("pretrained")}
        paths, pretrained, task = values.get("path") or [], values["pretrained"], values.get("task")
        if not isinstance(paths, list):
            raise ValueError(f"{path}: data.path={paths!r} must be a list")
        return cls(None if pretrained is None else Path(str(pretrained)), tuple(Path(str(x)) for x in paths), task)

    def tokenizer(self, begin: str | None = None) -> tuple[TwoWayTokenizer, Path | None]:
        """Returns the tokenizer, and the folder with its files: the pretrained one, or a store. None for bytes.

        Raises ValueError if no tokenizer is known, or it cannot be read.
        """
        # The pretrained folder's tokenizer comes first, because the run tokenizes text with it.
        if self.pretrained is not None and has_tokenizer(self.pretrained):
            return read_tokenizer(self.pretrained, begin), self.pretrained
        if self.paths is None:
            raise ValueError(f"the run has no {CONFIG}")
        if self.task is not None:
            raise ValueError(f"the run trained on the synthetic task {self.task}")
        paths, reasons = self.paths, list[str]()
        if self.pretrained is not None and not self.pretrained.is_dir():
            # Text was read with the tokenizer of this folder, if it had one. Stores name their own.
            paths, reasons = tuple(filter(is_store, paths)), [f"{self.pretrained} does not exist"]
        elif not paths:
            return ByteTokenizer(), None
        for path in paths:
            try:
                tokenizer = tokenizer_of(path, begin)
                return tokenizer, path if isinstance(tokenizer, TextTokenizer) else None
            except ValueError as error:
                reasons.append(str(error))
        raise ValueError("; ".join(reasons))


@contextmanager
def export_source(tokens: TokenSource) -> Generator[tuple[Path | None, str]]:
    """Makes a folder with the tokenizer of a run for exports, or None; and a phrase that names it, or says why not."""
    pretrained = tokens.pretrained if tokens.pretrained is not None and tokens.pretrained.is_dir() else None
    if has_tokenizer(pretrained):
        yield pretrained, f"tokenizer of {pretrained}"
        return
    with TemporaryDirectory() as name:
        try:
            source, phrase = Path(name), write_source(Path(name), tokens, pretrained)
        except ValueError as error:
            source, phrase = pretrained, f"no tokenizer: {error}; armillary-export --pretrained names one"
        yield source, phrase


def write_source(target: Path, tokens: TokenSource, pretrained: Path | None) -> str:
    """Writes a run's tokenizer and config.json, with fields of the pretrained one; returns a phrase about both."""
    tokenizer, folder = tokens.tokenizer()
    fields = read_json(pretrained / CONFIG) if pretrained is not None and (pretrained / CONFIG).is_file() else {}
    # The ids of special tokens are those of the run's tokens, and not those of the pretrained model.
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.end_of_document, "pad_token_id": None}
    if isinstance(tokenizer, TextTokenizer) and folder is not None:
        # The files as `transformers` reads them. By default it chooses the class by the model, and may then replace
        # parts of the definition.
        names = {"eos_token": tokenizer.end_name, "bos_token": tokenizer.begin_name, BEGIN: tokenizer.begin_name}
        names = {key: name for key, name in names.items() if name is not None}
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
        (target / "tokenizer.json").write_bytes(tokenizer.definition)
        (target / "tokenizer_config.json").write_text(json.dumps(settings))
        ids["bos_token_id"] = next(iter(tokenizer.begin_ids), None)
    (target / CONFIG).write_text(json.dumps(fields | ids))
    origin = "no tokenizer, since tokens are bytes" if folder is None else f"tokenizer of {folder}"
    return f"{origin}; token {tokenizer.end_of_document} ends a text"
