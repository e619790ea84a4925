"""Smoke test of an installed package; `scripts/release.py` runs it for each.

    python -I scripts/smoke.py armillary-core

Imports no package above, loads the package's entry points, and runs a small computation. Needs a writable working
directory.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import distribution, version
from importlib.util import find_spec


def armillary() -> None:
    spec = find_spec("armillary")
    assert spec is not None and spec.origin is None  # a namespace: a file __init__.py would hide the other packages
    for name in ("core", "attention", "states", "integrations", "data", "models", "train", "plan"):
        assert import_module(f"armillary.{name}").__version__ == version("armillary")


def core() -> None:
    import torch

    from armillary.core import Axis, SequenceLayout, build_mesh

    layout = SequenceLayout.zigzag(length=10, shards=2)
    x = torch.arange(20.0).view(2, 10)
    assert torch.equal(layout.join([layout.take(x, shard) for shard in range(2)]), x)
    assert Axis.of(build_mesh("cpu")["ring"]).size == 1


def attention() -> None:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    from armillary.attention import AttentionMask, Local

    q, k, v = (torch.randn(1, 32, 4, 16, requires_grad=True) for _ in range(3))
    out = Local()(q, k, v, mask=AttentionMask(causal=True))
    by_head = (x.transpose(1, 2) for x in (q, k, v))
    expected = scaled_dot_product_attention(next(by_head), next(by_head), next(by_head), is_causal=True)
    torch.testing.assert_close(out, expected.transpose(1, 2))
    out.sum().backward()
    assert q.grad is not None


def states() -> None:
    import torch
    from torch.nn.functional import normalize

    from armillary.states import gated_delta_rule

    q, k = (normalize(torch.randn(1, 32, 2, 8), dim=-1) for _ in range(2))
    v, g, beta = torch.randn(1, 32, 4, 8), -torch.rand(1, 32, 4), torch.rand(1, 32, 4, requires_grad=True)
    out, final = gated_delta_rule(q, k, v, g, beta)
    first, state = gated_delta_rule(*(x[:, :20] for x in (q, k, v, g, beta)))
    second, end = gated_delta_rule(*(x[:, 20:] for x in (q, k, v, g, beta)), initial_state=state)
    torch.testing.assert_close((torch.cat([first, second], 1), end), (out, final))
    out.sum().backward()
    assert beta.grad is not None


def integrations() -> None:
    from armillary.attention import Local
    from armillary.integrations import register_transformers, share_rows

    try:
        import transformers  # pyright: ignore # noqa: F401
    except ImportError:
        try:
            register_transformers(Local())
        except ImportError as error:
            assert "transformers" in str(error)
        else:
            raise AssertionError("register_transformers works without transformers")
    assert callable(share_rows)


def check() -> None:
    from armillary.attention import Local
    from armillary.check import check_method

    check_method(Local(), layouts=["contiguous"]).assert_right()


def data() -> None:
    from armillary.core import SequenceLayout
    from armillary.data import ByteTokenizer, Document, PackedSequences, TokenStore

    texts = (b"Rings within rings. ", b"Each turning on its own axis. ")
    store = TokenStore.of([Document(str(text), text * 40) for text in texts], ByteTokenizer())
    layout = SequenceLayout.zigzag(length=64, shards=2)
    batch = next(PackedSequences(store, layout=layout, shard=1, rows_per_batch=2, seed=1))
    assert batch.tokens.shape == batch.labels.shape == (2, 32)


def models() -> None:
    import torch

    from armillary.models import Llama, LlamaConfig, initialize, token_loss

    model = Llama(LlamaConfig.debug())
    initialize(model, seed=0)
    ids = torch.arange(65)[None]
    total, count = token_loss(model(ids[:, :-1]), ids[:, 1:])
    total.backward()
    assert (total / count).item() < 7
    model.save_pretrained("saved")
    assert Llama.from_pretrained("saved").config == model.config


def train() -> None:
    from armillary.train.cli import main

    main(["--train.steps", "2", "--data.sequence-length", "128", "--train.output", "outputs"])


def plan() -> None:
    from armillary.plan.cli import main

    main(["--model", "llama3-8b", "--cluster", "8xh100", "--tokens", "64Ki", "--best", "1"])


if __name__ == "__main__":
    name = sys.argv[1]
    for entry_point in distribution(name).entry_points:
        entry_point.load()
    trials = armillary, core, attention, states, integrations, check, data, models, train, plan
    {each.__name__: each for each in trials}[name.removeprefix("armillary-")]()
    print(f"ok: Python {sys.version.split()[0]}, torch {version('torch')}")
