"""Records are checked when they are created, and survive JSON with equal keys."""

import dataclasses
import json
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from biphase.errors import SpecError
from biphase.records import KEY_LENGTH, content_key, decode, encode, record
from biphase.specs import CLM, MLM, Classify, Cosine, Linear, Rows, Stage


@record
class Ship:
    name: str
    masts: int = 3
    speed: float = 7.5
    rig: Literal["square", "gaff"] = "square"
    ports: tuple[str, ...] = ()
    place: tuple[float, float] = (0.0, 0.0)
    load: int | float | None = None
    painted: bool = False


@pytest.mark.parametrize(
    ("fields", "facts"),
    [
        ({"mast": 2}, ["Ship", "'mast'", "'masts'"]),
        ({"masts": 2.5}, ["Ship.masts", "whole number", "2.5"]),
        ({"masts": True}, ["Ship.masts", "whole number", "True"]),
        ({"masts": "3"}, ["Ship.masts", "whole number", "'3'"]),
        ({"speed": "fast"}, ["Ship.speed", "a number", "'fast'"]),
        ({"speed": True}, ["Ship.speed", "a number", "True"]),
        ({"speed": float("inf")}, ["Ship.speed", "inf"]),
        ({"rig": "junk"}, ["Ship.rig", "'square' or 'gaff'", "'junk'"]),
        ({"ports": 3}, ["Ship.ports", "tuple", "3"]),
        ({"ports": (1,)}, ["Ship.ports", "tuple", "(1,)"]),
        ({"place": (1.0,)}, ["Ship.place", "2 values", "(1.0,)"]),
        ({"load": "full"}, ["Ship.load", "whole number", "None", "'full'"]),
        ({"painted": 1}, ["Ship.painted", "True or False", "1"]),
        ({"name": None}, ["Ship.name", "a text", "None"]),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_wrong_field_is_refused(fields, facts):
    with pytest.raises(SpecError) as refusal:
        Ship(**({"name": "argo"} | fields))
    assert all(fact in str(refusal.value) for fact in facts), refusal.value
    with pytest.raises(SpecError):
        decode(encode(Ship("argo")) | fields)


@pytest.mark.parametrize("values", ["", "abcdefghij"], ids=["none", "too many"])
def test_a_wrong_number_of_fields_is_refused(values):
    with pytest.raises(SpecError, match="name, masts"):
        Ship(*values)


def test_equal_values_make_equal_records():
    one = Ship("argo", 3.0, 7, ports="oslo", place=[1, 2])
    two = Ship("argo", 3, 7.0, ports=["oslo"], place=(1.0, 2.0))
    assert one == two
    assert hash(one) == hash(two)
    assert (type(one.masts), type(one.speed)) == (int, float)
    assert [type(Ship("a", load=load).load) for load in (5, 0.5, None)] == [int, float, type(None)]
    assert Ship("a", place=range(2)).place == (0.0, 1.0)


def test_records_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Ship("argo").masts = 2


def test_decode_refuses_an_unknown_kind():
    with pytest.raises(SpecError, match=r"'Shipp'.*'Ship'"):
        decode({"kind": "Shipp"})


texts = st.text(max_size=8)
ships = st.builds(
    Ship,
    name=texts,
    masts=st.integers(-(2**40), 2**40),
    speed=st.floats(allow_nan=False, allow_infinity=False),
    rig=st.sampled_from(["square", "gaff"]),
    ports=st.lists(texts, max_size=3),
    load=st.none() | st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    painted=st.booleans(),
)
ratios = st.floats(0.01, 0.99)
ways = st.builds(Linear, ratios, ratios, st.integers(1, 50)) | st.builds(
    Cosine, ratios, ratios, st.integers(1, 50)
)
stages = st.builds(Stage, st.just(CLM()) | st.builds(MLM, ratios | ways), st.integers(1, 9))


@given(ships | stages)
def test_a_record_survives_json_with_its_key(made):
    back = decode(json.loads(json.dumps(encode(made))))
    assert back == made
    assert content_key(back) == content_key(made)


@given(ships, ships)
def test_only_equal_records_have_equal_keys(one, two):
    assert (content_key(one) == content_key(two)) == (encode(one) == encode(two) and repr(one) == repr(two))


def test_a_key_does_not_depend_on_the_order_of_names():
    assert content_key({"a": 1, "b": 2}) == content_key({"b": 2, "a": 1})
    assert len(content_key({})) == KEY_LENGTH == 32


def test_a_key_is_the_same_on_every_machine():
    # Were this to change, every finished result of every store would be lost.
    assert content_key(Rows(64)) == "1947f13407d15b6b56b0a0ae133ea659"
    assert content_key(MLM(0.4)) == "9bfb2707ab8fecab8d7cd79bcaffe638"


def test_nan_has_no_key():
    with pytest.raises(ValueError):
        content_key({"a": float("nan")})


def test_an_added_field_changes_no_key_at_its_default():
    plain, numbered = Classify("{text}", ("a", "b")), Classify("{text}", ("1", "0"), numbered=True)
    assert "numbered" not in encode(plain)
    assert encode(numbered)["numbered"] is True
    assert decode(encode(numbered)) == numbered
    assert decode(encode(plain)) == plain
