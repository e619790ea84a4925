"""Every head class of transformers on two ranks and on one: right, refused, or wrong without an error.

    python benchmarks/model_heads.py                                # all: an hour on two cores; resumes a run
    python benchmarks/model_heads.py --only BambaForCausalLM Llama  # classes with these in their names, no report
    python benchmarks/model_heads.py --report                       # the report of the cases that have run

A class that an auto class of transformers maps a model type to is built as a tiny random copy in float64. Its cases:

- `plain`: two rows, with the labels that `batch.inputs` has, or one label per row for a model that scores rows.
- `padded`: a row of which an attention_mask hides the end, against the row alone.
- `token labels`: labels passed to a model whose loss is not of the next token.
- `FIELD=VALUE`: plain, with a field of the config that changes the loss: coefficients become 0.3, switches True.

`right`: the loss, outputs of tokens and of rows, and gradients equal those of one rank. `refused`: our error, the same
on all ranks. `wrong`: other numbers. `failed`: an error of another type, or of some ranks alone. `not built`: no tiny
copy, or one that does not run on token ids on one rank. Each case is a line of the progress file, and is not run again.
The command exits with 1 if a case is wrong or failed.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from typing import Any

import check_models
import torch
import transformers
from report import write
from torch import Tensor, nn
from transformers.models.auto import modeling_auto

from armillary.attention import ContextParallel
from armillary.check import error_line
from armillary.check.architecture import WEIGHT_NOISE, InFloat64
from armillary.check.tiny import VOCABULARY, load_config, tiny_config
from armillary.core.testing import RankFailed, Worlds, mesh, relative_error
from armillary.integrations.transformers.outputs import predicts_next_token, scores_row_ends

RANKS, TOKENS, VISIBLE, PADDING = 2, 50, 31, 2
LIMIT = 1e-4
"""Limit of relative errors: some models round to float32 internally."""
CLASSES, COEFFICIENT = 2, 0.3
MAX_PARAMETERS = 100_000_000
"""Larger copies are not built: towers of images or sound whose sizes `tiny_config` does not shrink."""
LOSS_FIELD = re.compile("loss|aux.*coef|output_router_logits")
"""Matches names of a config's fields that change the loss."""
CASES = ("plain", "padded", "token labels")
NO_TOKENS = "without token ids"
VERDICTS = ("right", "refused", "wrong", "failed", "not built", NO_TOKENS)

REFUSALS = ("ValueError", "NoTensorError")
"""Types of errors by which the library refuses a model."""

Answer = dict[str, Tensor] | str
"""Outputs and gradients by name, or an error."""


def head_classes() -> dict[str, str]:
    """Returns the model type of each class that an auto class for a task builds, by the name of the class."""
    families: dict[str, str] = {}
    for mapping in sorted(vars(modeling_auto)):
        if re.fullmatch(r"MODEL_FOR_\w+_MAPPING_NAMES", mapping):
            for family, names in getattr(modeling_auto, mapping).items():
                for name in (names,) if isinstance(names, str) else names:
                    families.setdefault(name, family)
    return dict(sorted(families.items()))


def cases_of(name: str, family: str) -> list[str]:
    """Returns the names of the cases of a class; none if it takes no token ids.

    Raises:
        ValueError: no tiny copy can be built.
    """
    parameters = signature(getattr(transformers, name).forward).parameters
    if "input_ids" not in parameters:
        return []
    config = config_of(family)
    with torch.device("meta"):
        model = getattr(transformers, name)(config)
    size = sum(p.numel() for p in model.parameters())
    if size > MAX_PARAMETERS:
        raise ValueError(f"the tiny copy has {size:,} parameters")
    fields = sorted({field for _, field, _ in loss_fields(config)})
    has_labels, other_loss = "labels" in parameters, not predicts_next_token(model)
    return ["plain", "padded", *(["token labels"] if other_loss else []), *(fields if has_labels else [])]


def loss_fields(config: Any) -> Iterator[tuple[Any, str, Any]]:
    """Yields (config or part of it, field, new value) for each field that changes the loss."""
    parts = [config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", ()))]
    for part in parts:
        for field, value in vars(part).items() if part is not None else ():
            if LOSS_FIELD.search(field) and isinstance(value, (bool, int, float)):
                yield part, field, True if isinstance(value, bool) else COEFFICIENT


def config_of(family: str, case: str = "plain") -> Any:
    config = tiny_config(load_config(family), TOKENS)
    config.num_labels = CLASSES
    for part, field, value in loss_fields(config):
        if field == case:
            setattr(part, field, value)
            if "router" in field or "aux" in field:  # a coefficient without its switch
                config.output_router_logits = part.output_router_logits = True
    return config


def new_model(name: str, family: str, case: str) -> nn.Module:
    torch.manual_seed(0)
    options = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = getattr(transformers, name)._from_config(config_of(family, case), **options).double()
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if isinstance(module, nn.Dropout):  # some heads have one that no config sets to 0
            module.p = 0.0
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(noise, alpha=WEIGHT_NOISE)
    return model.train()


def rows(model: Any, case: str) -> tuple[Tensor, Tensor | None]:
    """Returns token ids [B, N] and, for padded rows, the attention_mask [B, N]."""
    padding: int | None = model.config.get_text_config().pad_token_id
    # transformers scores one row alone if it has no id of padding.
    count = 1 if case == "padded" or padding is None else 2
    ids = torch.randint(3, VOCABULARY - 4, (count, TOKENS), generator=torch.Generator().manual_seed(2))
    if case != "padded":
        return ids, None
    visible = (torch.arange(TOKENS) < VISIBLE)[None]
    return ids.masked_fill(~visible, PADDING if padding is None else padding), visible.long()


def call(model: Any, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """Returns the floating-point outputs of a forward by name, without KV caches and tuples of layers."""
    takes = signature(model.forward).parameters
    options = {"use_cache": False} if "use_cache" in takes else {}
    inputs = {name: x for name, x in inputs.items() if name not in ("position_ids", "attention_mask") or name in takes}
    with InFloat64():
        output = model(**inputs, **options)
    return {name: x for name, x in output.items() if isinstance(x, Tensor) and x.is_floating_point()}


def row_labels(ids: Tensor) -> Tensor:
    return torch.arange(len(ids)) % CLASSES


def upstream(x: Tensor) -> Tensor:
    """Returns random gradients of whole outputs of tokens [B, N, ...]."""
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def on_one_rank(name: str, family: str, case: str) -> Answer:
    quiet()
    try:
        model: Any = new_model(name, family, case)
        ids, mask = rows(model, case)
        ids = ids if mask is None else ids[:, :VISIBLE]
        inputs = {"input_ids": ids}
        if scores_row_ends(type(model)):
            inputs["labels"] = row_labels(ids)
        elif case == "token labels":
            inputs["labels"] = ids % CLASSES
        elif "labels" in signature(model.forward).parameters and predicts_next_token(model):
            inputs["labels"] = ids
        outputs = call(model, inputs)
        objective = outputs.get("loss")
        if objective is None:
            x = next(iter(outputs.values()))
            objective = (x * upstream(x)).sum()
        objective.backward()
        return {**{k: x.detach() for k, x in outputs.items()}, **gradients_of(model)}
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def on_a_shard(name: str, family: str, case: str) -> Answer:
    """Returns outputs of whole rows and averaged gradients."""
    quiet()
    try:
        cp = ContextParallel("ring", mesh(ring=RANKS))
        model: Any = cp.prepare(new_model(name, family, case))
        ids, mask = rows(model, case)
        token_labels = ids if mask is None else ids.masked_fill(mask == 0, -100)
        labels = {} if cp.shifts_labels else {"shift_labels": token_labels}
        with cp.shard(ids, attention_mask=mask, **labels) as batch:
            inputs = batch.inputs
            if scores_row_ends(type(model)):
                inputs = {k: x for k, x in inputs.items() if k not in ("shift_labels", "num_items_in_batch")}
                inputs["labels"] = row_labels(ids)
            elif case == "token labels":
                inputs |= {"labels": batch.ids % CLASSES, "num_items_in_batch": batch.labelled}
            elif "labels" not in signature(model.forward).parameters:
                inputs = {k: x for k, x in inputs.items() if k not in ("labels", "shift_labels", "num_items_in_batch")}
            local = call(model, inputs)
            outputs, visible = dict[str, Tensor](), slice(None if mask is None else VISIBLE)
            for key, x in local.items():
                has_tokens = x.ndim > 1 and x.shape[1] == batch.ids.shape[1]
                outputs[key] = batch.gather(x.detach())[:, visible] if has_tokens else x.detach()
            objective = local.get("loss")
            if objective is None:
                key, x = next(iter(local.items()))
                weights = upstream(outputs[key])
                if mask is not None:
                    weights = torch.cat([weights, weights.new_zeros(1, TOKENS - VISIBLE, *weights.shape[2:])], 1)
                objective, _ = (x * batch.take(weights)).sum(), batch.labelled
                objective = cp.loss(objective, batch)
            elif not scores_row_ends(type(model)):
                objective = outputs["loss"] = cp.loss(objective, batch)
        objective.backward()
        cp.reduce_gradients(model)
        return {**{k: x.detach() for k, x in outputs.items()}, **gradients_of(model)}
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {f"gradient of {k}": p.grad for k, p in sorted(model.named_parameters()) if p.grad is not None}


def verdict(expected: Answer, answers: list[Answer]) -> tuple[str, str]:
    """Returns the verdict of a case and its reason."""
    errors = [answer for answer in answers if isinstance(answer, str)]
    is_refusal = len(errors) == len(answers) and len(set(errors)) == 1 and errors[0].startswith(REFUSALS)
    if isinstance(expected, str) and (expected in errors or not is_refusal):
        return "not built", expected
    if is_refusal:
        return "refused", errors[0]
    assert not isinstance(expected, str)
    if errors:
        return "failed", " | ".join(sorted(set(errors)))
    worst, where = 0.0, ""
    largest = max((float(x.norm()) for k, x in expected.items() if k.startswith("gradient")), default=0.0)
    for answer in answers:
        assert not isinstance(answer, str)
        for key, x in expected.items():
            if key not in answer or answer[key].shape != x.shape:
                return "wrong", f"{key} {list(x.shape)} is {list(answer[key].shape) if key in answer else 'missing'}"
            # Gradients that are 0 but for rounding, such as those of biases of keys.
            if key.startswith("gradient") and float(x.norm()) < 1e-9 * largest:
                continue
            error = relative_error(answer[key], x)
            if not error <= worst:
                worst, where = error, key
    return ("right" if worst < LIMIT else "wrong"), f"{worst:.0e} {where}"


def outcomes(name: str, family: str, done: dict[tuple[str, str], str], worlds: Worlds) -> Iterator[dict[str, str]]:
    """Yields a row for each case of a class that is not done.

    Args:
        done: the verdict of each finished (class, case).
    """
    if done.get((name, "plain")) in ("not built", NO_TOKENS):
        return
    try:
        cases = cases_of(name, family)
    except Exception as error:
        yield row(name, "plain", "not built", f"{type(error).__name__}: {error}")
        return
    if not cases:
        yield row(name, "plain", NO_TOKENS, "")
    for case in cases:
        if (name, case) in done:
            continue
        try:
            expected = worlds(1).run(on_one_rank, name, family, case)[0]
            answers = worlds(RANKS).run(on_a_shard, name, family, case)
            result = verdict(expected, answers)
        except RankFailed as failure:
            result = "failed", error_line(failure)
        yield row(name, case, *result)
        if case == "plain" and result[0] == "not built":
            return


def row(name: str, case: str, verdict: str, reason: str) -> dict[str, str]:
    words = " ".join(re.sub(r"/\S+/", "", reason).split())
    return {"class": name, "case": case, "verdict": verdict, "reason": words.removeprefix("ValueError: ")[:100]}


def report(lines: list[dict[str, str]]) -> None:
    """Writes a row for each class of which a tiny copy runs on one rank, and is not refused whatever its inputs."""
    verdicts = {(line["class"], line["case"]): line["verdict"] for line in lines}
    table: list[dict[str, str | None]] = []
    for name in sorted({line["class"] for line in lines}):
        of_class = [line for line in lines if line["class"] == name]
        fields = [f"{line['case']} {line['verdict']}" for line in of_class if line["case"] not in CASES]
        reasons = [line["reason"] for line in of_class if line["verdict"] not in ("right", "not built")]
        if all(
            line["verdict"] in ("refused", "not built", NO_TOKENS) for line in of_class if line["case"] in CASES[:2]
        ):
            continue
        cases: dict[str, str | None] = {case: verdicts.get((name, case)) for case in CASES}
        table.append({"class": name, **cases, "fields": ", ".join(fields) or None, "reason": "; ".join(set(reasons))})
    counts = Counter(line["verdict"] for line in lines)
    first = {line["class"]: line for line in reversed(lines)}  # the plain case, or the only one
    causes = Counter(check_models.cause(line) for line in first.values() if line["verdict"] == "refused")
    notes = [
        f"{len(lines)} cases of {len(first)} of {len(head_classes())} classes: "
        + ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS)
        + ". Classes of which both the plain and the padded case are refused, or do not run, have no row.",
        "`fields` are cases with one field of the config changed that may change the loss: coefficients to 0.3, "
        "switches to True. `token labels` are labels given to a model whose loss is not of the next token.",
        "Refused: " + ", ".join(f"{count} classes ({reason})" for reason, count in causes.most_common()) + ".",
    ]
    write("heads", "Heads of Hugging Face models", table, notes, command="python benchmarks/model_heads.py")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="parts of the names of classes (default: all)")
    parser.add_argument(
        "--progress", type=Path, default=Path("outputs/model_heads.jsonl"), help="file of finished cases"
    )
    parser.add_argument("--report", action="store_true", help="only write the report of the finished cases")
    options = parser.parse_args()
    options.progress.parent.mkdir(parents=True, exist_ok=True)
    options.progress.touch()
    lines: list[dict[str, str]] = [json.loads(line) for line in options.progress.read_text().splitlines()]
    if not options.report:
        quiet()
        lines += run(options.only, lines, options.progress)
    if not options.only:
        report(lines)
    sys.exit(any(line["verdict"] in ("wrong", "failed") for line in lines))


def run(only: list[str], lines: list[dict[str, str]], path: Path) -> list[dict[str, str]]:
    """Returns rows of the cases that are not in `lines`, and appends them to the file of finished cases."""
    done = {(line["class"], line["case"]): line["verdict"] for line in lines}
    classes = {name: x for name, x in head_classes().items() if not only or any(part in name for part in only)}
    worlds, rows_of_run = Worlds(), list[dict[str, str]]()
    with path.open("a") as progress:
        for number, (name, family) in enumerate(classes.items(), 1):
            for outcome in outcomes(name, family, done, worlds):
                rows_of_run.append(outcome)
                print(f"{number} of {len(classes)}:", *outcome.values(), flush=True)
                print(json.dumps(outcome), file=progress, flush=True)
    worlds.close()
    return rows_of_run


def quiet() -> None:
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")


if __name__ == "__main__":
    main()
