"""The form of all messages, names that are nearly right, and missing extras."""

from __future__ import annotations

import ast
import os
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import trajstore
from trajstore import errors
from trajstore.errors import InvalidArgument, MissingExtra, did_you_mean, needs_extra
from trajstore.schema import resolve_variables, variable


def test_a_missing_package_names_its_extra_with_a_command_to_paste() -> None:
    with pytest.raises(MissingExtra) as raised, needs_extra("a file", "hdf5", "write .csv"):
        import no_such_package  # type: ignore[import-not-found]  # noqa: F401
    sentence = str(pickle.loads(pickle.dumps(raised.value)))
    command = "pip install -c constraints.txt '.[hdf5]'"
    assert sentence == f"a file needs the extra hdf5: {command}; or write .csv"


def test_a_missing_module_of_trajstore_needs_no_extra() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"trajstore\.nothing"), needs_extra("a", "b"):
        import trajstore.nothing  # noqa: F401


@pytest.mark.parametrize(
    ("typed", "known", "suggestion"),
    [
        ("w", ["W", "grad"], " (did you mean 'W'?)"),
        ("exp-avg", ["exp_avg", "exp_avg_sq"], " (did you mean 'exp_avg'?)"),
        ("thimble7", ["thimble-6", "thimble-7"], " (did you mean 'thimble-7'?)"),
        ("rl", ["name", "lr"], " (did you mean 'lr'?)"),
        ("nothing", ["W", "grad"], ""),
        ("", ["W"], ""),
        ("W", [], ""),
    ],
)
def test_the_nearest_name_is_suggested(typed: str, known: list[str], suggestion: str) -> None:
    assert did_you_mean(typed, known) == suggestion


def test_mistyped_variables_get_a_suggestion() -> None:
    with pytest.raises(InvalidArgument, match="'gard' \\(did you mean 'grad'\\?\\)"):
        variable("gard")
    with pytest.raises(InvalidArgument, match="'weigths' \\(did you mean 'weights'\\?\\)"):
        resolve_variables("weigths")
    with pytest.raises(InvalidArgument, match="got 'loss, lr' without W"):
        resolve_variables(("loss", "lr"))


def _texts(node: ast.expr) -> str:
    """A message with {} for what it fills in."""
    if isinstance(node, ast.BinOp):
        return _texts(node.left) + _texts(node.right)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_texts, node.values))
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else "{}"


def _messages(*, of: set[str]) -> Iterator[tuple[str, str, str]]:
    """Each error of these classes that the package makes: its place, class and message."""
    for folder, _, names in os.walk(trajstore.__path__[0], followlinks=True):
        for file in (Path(folder, name) for name in names if name.endswith(".py")):
            calls = (n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Call))
            for call in calls:
                if isinstance(call.func, ast.Name) and call.func.id in of and call.args:
                    yield f"{file.name}:{call.lineno}", call.func.id, _texts(call.args[0])


def test_messages_say_problem_value_and_fix_in_short_sentences() -> None:
    """What `optimizer_rule` and `new_run` raise is a reason in the sentence of who asks."""
    classes = {name for name, kind in vars(errors).items() if isinstance(kind, type)}
    found = [*_messages(of=classes - {"MissingExtra"})]
    assert len(found) > 500
    reasons = ("optimizer_rule.py", "new_run.py")
    for place, kind, text in found:
        assert not text.endswith((".", "!")) or "zip -0r" in text, place
        assert "\n" in text or "  " not in text, place
        assert all(len(part.split()) <= 25 for part in re.split(r"[;:\n]|\. ", text)), place
        if kind == "InvalidArgument" and not place.startswith(reasons):
            assert re.search(r"expected|[;:] |\{\}$", text), f"{place} names no fix: {text}"
