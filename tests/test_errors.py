"""A refusal ends with the name that was probably meant."""

import pytest

from biphase import errors


def test_the_closest_name_is_proposed():
    assert errors.nearest("fineweb-edo", ["builtin", "fineweb-edu"]) == "did you mean 'fineweb-edu'?"


def test_without_a_close_name_all_are_listed():
    assert errors.nearest("x", ["builtin", "fineweb-edu"]) == "known: builtin, fineweb-edu"


@pytest.mark.parametrize(
    "kind", ["SpecError", "DataError", "StoreError", "ModelError", "TrainingError", "ClusterError"]
)
def test_every_refusal_can_be_caught_as_one(kind):
    assert issubclass(getattr(errors, kind), errors.BiphaseError)
