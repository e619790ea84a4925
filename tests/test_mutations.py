"""scripts/mutate.py: its mutations match the current code, and it reports which of them the tests catch."""

import ast
import runpy
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[1]
mutate = SimpleNamespace(**runpy.run_path(str(ROOT / "scripts/mutate.py")))
MUTATIONS = mutate.load(mutate.MUTATIONS)


def test_mutations_change_one_place_and_name_existing_tests():
    text = cache(lambda name: (ROOT / name).read_text())
    for mutation in MUTATIONS:
        mutation.locate(ROOT)  # raises unless the old code is in one place
        old, new = ([ast.dump(node) for node in pattern] for pattern in mutation.patterns())
        assert old != new and mutation.breaks, mutation.name
        assert (ROOT / "packages" / mutation.package / "tests").is_dir(), mutation.name
        for name in mutation.likely:
            file, _, test = name.partition("::")
            assert f"def {test or 'test'}" in text(file), (mutation.name, name)


def test_every_package_has_mutations():
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 50
    assert {m.package for m in MUTATIONS} == {path.parent.name for path in (ROOT / "packages").glob("*/src")}


@pytest.fixture
def workspace(tmp_path):
    tests = tmp_path / "packages/one/tests"
    for folder in (tests, tmp_path / "tests", tmp_path / "packages/one/src"):
        folder.mkdir(parents=True)
    (tmp_path / "packages/one/src/adding.py").write_text("def add(a, b):\n    return a + b\n")
    (tests / "test_likely.py").write_text("from adding import add\n\n\ndef test_none():\n    assert add(0, 0) == 0\n")
    (tests / "test_other.py").write_text("from adding import add\n\n\ndef test_two():\n    assert add(1, 1) == 2\n")
    return tmp_path


@pytest.mark.parametrize(
    ("new", "likely", "caught", "by"),
    [("_A * _B", False, True, "packages/one/tests/test_other.py::test_two"), ("_B + _A", True, False, "")],
)
def test_report_names_the_failing_test(workspace, new, likely, caught, by):
    source = workspace / "packages/one/src/adding.py"
    before = source.read_text()
    first = ("packages/one/tests/test_likely.py",)
    changed = mutate.Mutation("add", "one", "add", "_A + _B", new, "sums", first)
    outcome = mutate.run_mutation(workspace, changed, likely)
    assert (outcome.caught, outcome.by) == (caught, by)
    assert source.read_text() == before


def test_code_that_occurs_twice_or_nowhere_is_refused(workspace):
    source = workspace / "packages/one/src/adding.py"
    source.write_text("def add(a, b):\n    return a + b + (b + a)\n")
    for old in ("_A + _B", "_A - _B"):
        with pytest.raises(ValueError, match="add"):
            mutate.Mutation("add", "one", "add", old, "0", "sums", ()).locate(workspace)


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ("_A * _A", "_A", "g(y, x * y + x)\n    return x"),  # a placeholder stands for one expression everywhere
        ("_B(_A, _C)\nreturn x", "return _A", "return y"),
        ("return x", "", "g(y, x * y + x * x)\n    pass"),
    ],
)
def test_patterns_match_expressions_and_statements(workspace, old, new, changed):
    source = workspace / "packages/one/src/adding.py"
    source.write_text("def f(x, y):\n    g(y, x * y + x * x)  # a comment\n    return x\n")
    assert mutate.Mutation("f", "one", "f", old, new, "", ()).apply(source) == f"def f(x, y):\n    {changed}"


def test_changed_code_that_does_not_compile_is_refused(workspace):
    mutation = mutate.Mutation("add", "one", "add", "return _A", "break", "", ())  # outside a loop
    with pytest.raises(SyntaxError):
        mutation.apply(workspace / "packages/one/src/adding.py")


def test_patterns_match_any_body(workspace):
    source = workspace / "packages/one/src/adding.py"
    source.write_text("def f(x):\n    with a(x), b(x):\n        c(x)\n        return x\n")
    mutation = mutate.Mutation("f", "one", "f", "with a(_A), b(_A):\n    ...", "with a(_A):\n    ...", "", ())
    assert mutation.apply(source) == "def f(x):\n    with a(x):\n        c(x)\n        return x"


def test_tests_that_hang_are_ended(workspace):
    test = workspace / "packages/one/tests/test_likely.py"
    test.write_text("import time\n\n\ndef test_long():\n    time.sleep(600)\n")
    outcome = mutate.run_tests(workspace, [str(test)], limit=3.0)
    assert (outcome.caught, outcome.by) == (True, "did not end in 3 s")
