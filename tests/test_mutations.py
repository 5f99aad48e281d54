"""The list of mutations is kept up to date, and every mutation is detected by the test that it names."""

import ast
import importlib.util
import sys
from pathlib import Path

import pytest

SPEC = importlib.util.spec_from_file_location("mutations", Path(__file__).with_name("mutations.py"))
mutations = sys.modules["mutations"] = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(mutations)
MUTATIONS = mutations.MUTATIONS
TESTS = Path(__file__).parent


def functions(path):
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def test_every_mutation_applies_and_names_a_test():
    wrong = []
    for mutation in MUTATIONS:
        try:
            assert mutation.old != mutation.new
            ast.parse(mutations.source_of(mutation))
        except (AssertionError, OSError, SyntaxError, ValueError) as error:
            wrong.append(f"{mutation.name}: {error}")
        path, *_, function = mutation.test.split("::")
        if not (TESTS / path).exists() or function not in functions(TESTS / path):
            wrong.append(f"{mutation.name}: no test {mutation.test}")
    assert not wrong, "\n".join(wrong)


def test_the_list_is_long_and_subtle_enough():
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 50
    assert sum(mutation.subtle for mutation in MUTATIONS) >= 25


@pytest.fixture(scope="module")
def unchanged(request):
    """The tests of the selected mutations pass on an unchanged copy."""
    selected = [getattr(item, "callspec", None) for item in request.session.items]
    chosen = {call.params["mutation"].test for call in selected if call and "mutation" in call.params}
    code, messages = mutations.run(sorted(chosen))
    assert code == 0, messages


@pytest.mark.campaign
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name.replace(" ", "-"))
def test_the_mutation_is_detected(unchanged, mutation):
    assert mutations.survives(mutation) == ""
