"""The pages of the docs: listings run as they stand, and what is written as a change comes to the same as before it."""

import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from armillary.attention.kernels import EFFICIENCY, KERNELS
from armillary.core.testing.accelerated import accelerated

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
NAV = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]
RANKS = 4


def listings(page: str, language: str) -> list[str]:
    """The code blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", (DOCS / page).read_text(), re.M | re.S)


def side(diff: str, signs: str) -> str:
    """One side of a diff: the lines that begin with one of these signs."""
    return "".join(line[1:] for line in diff.splitlines(keepends=True) if line[:1] in (*signs, "\n"))


@contextmanager
def in_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        with patch.dict(os.environ, WORLD_SIZE=str(torch.distributed.get_world_size())):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def small_mistral(folder: Path) -> dict[str, object]:
    """What the page on Hugging Face models takes from its reader: a folder with a model, and rows."""
    from transformers import MistralConfig, MistralForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = MistralConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, sliding_window=60)
    torch.manual_seed(0)
    MistralForCausalLM(config).save_pretrained(folder)  # by one rank, as transformers has it
    torch.distributed.barrier()
    rows = [torch.randint(64, (2, 250)) for _ in range(3)]
    lengths = [int(torch.randint(60, 120, ())) for _ in range(6 * RANKS)]
    made = [torch.randint(64, (length,)) for length in lengths]
    data = [{"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids} for ids in made]
    return {"folder": folder, "rows": rows, "output": str(folder / "output"), "data": data}


def small_flux(folder: Path) -> dict[str, object]:
    """What the page on diffusers takes from its reader: a folder with a model, and batches."""
    from diffusers import FluxTransformer2DModel

    sizes = {"num_layers": 1, "num_single_layers": 1, "num_attention_heads": 4, "attention_head_dim": 16}
    inputs = {"in_channels": 8, "joint_attention_dim": 24, "pooled_projection_dim": 12, "axes_dims_rope": (4, 6, 6)}
    torch.manual_seed(0)
    model = FluxTransformer2DModel(**sizes, **inputs)
    if torch.distributed.get_rank() == 0:
        model.save_pretrained(folder)
    torch.distributed.barrier()
    told = {"encoder_hidden_states": (2, 7, 24), "pooled_projections": (2, 12), "txt_ids": (7, 3), "img_ids": (27, 3)}
    drawn = [[torch.randn(2, 27, 8), {name: torch.randn(size) for name, size in told.items()}] for _ in range(3)]
    return {"folder": folder, "batches": drawn}


def rows_of_one_length(folder: Path) -> dict[str, object]:
    """What the page on accelerate takes: the same folder, and rows of tokens."""
    return small_mistral(folder) | {"data": torch.randint(64, (3 * RANKS, 60))}


GIVEN = {"transformers.md": small_mistral, "trainer.md": small_mistral, "accelerate.md": rows_of_one_length}
GIVEN |= {"diffusers.md": small_flux}


def run_both_sides(page: str, folder: Path) -> list[tuple[list[float], list[float]]]:
    """Losses and gradient norms before the change of a page and after it."""
    common, (diff, *_) = "".join(listings(page, "python")), listings(page, "diff")
    found = []
    with in_float64():
        given = GIVEN[page](folder) if page in GIVEN else {}
        for signs in (" -", " +"):
            names = dict(given)
            with accelerated():
                exec(common + side(diff, signs), names)
            found.append((names["losses"], names["norms"]))
    return found


@pytest.mark.parametrize(
    ("page", "ranks", "limit"),
    [
        ("fsdp2.md", RANKS, 1e-9),
        ("transformers.md", RANKS, 1e-6),  # Mistral's norms compute in float32
        ("trainer.md", 2, 1e-6),
        ("accelerate.md", RANKS, 1e-6),
        ("diffusers.md", 2, 1e-9),
        ("plain-torch.md", RANKS, 1e-9),
    ],
)
def test_after_the_change_losses_and_gradients_are_those_of_before(worlds, tmp_path, page, ranks, limit):
    for before, after in worlds(ranks).run(run_both_sides, page, tmp_path):
        for one, other in zip(before, after, strict=True):
            assert len(one) == 3
            assert other == pytest.approx(one, rel=limit)


def run_listings(page: str) -> None:
    assert listings(page, "python")
    exec("".join(listings(page, "python")), {})


@pytest.mark.parametrize("page", ["masks.md", "layouts.md", "choosing.md", "trees.md"])
def test_listings_run_as_they_stand(page):
    run_listings(page)


def test_the_page_of_masks_has_the_pictures_that_are_drawn_for_it():
    shown = re.findall(r"\]\((pictures/\w+\.png)\)", (DOCS / "masks.md").read_text())
    assert sorted(shown) == sorted(str(path.relative_to(DOCS)) for path in DOCS.glob("pictures/*"))


def test_the_listing_of_the_first_page_runs_on_four_ranks(worlds):
    worlds(RANKS).run(run_listings, "index.md")


def test_messages_of_the_troubleshooting_page_are_in_the_code():
    sources = "".join(path.read_text() for path in ROOT.glob("packages/*/src/**/*.py"))
    code = re.sub(r'"\s*\n\s*f?["\']', "", sources)  # strings that continue on the next line
    shown = re.findall(r"^\| (`+)(.+?)\1 \|", (DOCS / "troubleshooting.md").read_text(), re.M)
    assert len(shown) > 20
    for _, message in shown:
        for part in message.split("…"):
            assert part.strip() in code, message


def pages(entries: list[dict[str, object]]) -> Iterator[str]:
    """The files that a navigation names."""
    for entry in entries:
        for inner in entry.values():
            yield from [inner] if isinstance(inner, str) else pages(inner)


def test_the_navigation_names_each_page_once():
    assert sorted(pages(NAV)) == sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))


@pytest.mark.long
def test_the_site_builds_without_a_warning(tmp_path):
    shutil.copytree(DOCS, tmp_path / "docs")  # the site must lie beside its pages
    (tmp_path / "packages").symlink_to(ROOT / "packages")
    shutil.copy(ROOT / "zensical.toml", tmp_path)
    build = ["--only-group", "docs", "--isolated", "zensical", "build", "--strict"]
    command = ["uv", "run", "--project", str(ROOT), *build]
    built = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert built.returncode == 0, built.stdout + built.stderr
    for page in pages(NAV):
        written = tmp_path / "site" / ("" if page == "index.md" else page.removesuffix(".md")) / "index.html"
        html = written.read_text()
        for name in re.findall(r"^::: (\S+)", (DOCS / page).read_text(), re.M):
            assert f'id="{name}"' in html, f"{page}: {name}"


def test_the_page_of_kernels_has_each_with_its_published_figures():
    rows = dict(re.findall(r"^\| `(\w+)` (.*)", (DOCS / "kernels.md").read_text(), re.M))
    assert set(rows) == {kernel.name for kernel in KERNELS} and "as `flash_attn_2`" in rows["cuda_flash"]
    for (name, _), figures in EFFICIENCY.items():
        row = rows["flash_attn_2" if name == "cuda_flash" else name]
        assert all(f"{share:.0%}" in row for share in (figures.full, figures.causal, figures.backward))
