"""The README's example runs unmodified."""

from pathlib import Path
from runpy import run_path


def test_the_example_runs_and_reads_its_shard(tmp_path):
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    (tmp_path / "example.py").write_text(readme.split("```python\n")[1].split("```")[0])
    names = run_path(str(tmp_path / "example.py"))
    assert names["batch"].tokens.shape == names["batch"].labels.shape == (4, 256)
    assert names["loss"].isfinite()
    assert names["state"]["rows"] == 40
