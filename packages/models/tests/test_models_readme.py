"""The README's example runs as it stands."""

from pathlib import Path
from runpy import run_path

from armillary.models import Llama


def test_the_example_learns_its_text_and_saves_itself(tmp_path, monkeypatch):
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    (tmp_path / "example.py").write_text(readme.split("```python\n")[1].split("```")[0])
    monkeypatch.chdir(tmp_path)
    names = run_path(str(tmp_path / "example.py"))
    assert names["total"] / names["count"] < 3.5  # 5.5 at first, ln(257)
    assert Llama.from_pretrained("outputs/debug").config == names["model"].config
