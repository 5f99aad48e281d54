"""Records are checked when they are made, and mean the same after a trip through JSON."""

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


def test_a_misspelt_field_is_refused_with_the_nearest():
    with pytest.raises(SpecError, match="Ship has no field 'mast'; did you mean 'masts'"):
        Ship("argo", mast=2)


def test_a_missing_field_is_refused_with_the_list_of_fields():
    with pytest.raises(
        SpecError, match="Ship: missing 1 required positional argument: 'name'; it takes name, masts"
    ):
        Ship()


def test_too_many_values_are_refused():
    with pytest.raises(SpecError, match="Ship: takes from 2 to 9 positional arguments"):
        Ship(*"abcdefghij")


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("masts", 2.5, "a whole number, not 2.5"),
        ("masts", True, "a whole number, not True"),
        ("masts", "3", "a whole number, not '3'"),
        ("speed", "fast", "a number, not 'fast'"),
        ("speed", True, "a number, not True"),
        ("rig", "junk", "'square' or 'gaff', not 'junk'"),
        ("ports", "oslo", "a tuple of a text, not 'oslo'"),
        ("ports", (1,), r"a tuple of a text, not \(1,\)"),
        ("place", (1.0,), r"2 values, not \(1.0,\)"),
        ("load", "full", "a whole number or a number or None, not 'full'"),
        ("painted", 1, "True or False, not 1"),
        ("name", None, "a text, not None"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_in_words(field, value, words):
    with pytest.raises(SpecError, match=rf"Ship\.{field} must be {words}"):
        Ship(**{"name": "argo", field: value})


def test_equal_spellings_become_equal_records():
    one = Ship("argo", 3.0, 7, ports=["oslo"], place=[1, 2])
    two = Ship("argo", 3, 7.0, ports=("oslo",), place=(1.0, 2.0))
    assert one == two
    assert hash(one) == hash(two)
    assert type(one.masts) is int
    assert type(one.speed) is float


def test_where_a_count_and_a_share_are_allowed_both_stay_what_they_are():
    assert type(Ship("a", load=5).load) is int
    assert type(Ship("a", load=0.5).load) is float
    assert Ship("a", load=None).load is None


def test_a_range_is_a_tuple_of_numbers():
    @record
    class Seeds:
        seeds: tuple[int, ...]

    assert Seeds(range(3)).seeds == (0, 1, 2)


def test_records_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Ship("argo").masts = 2


def test_decode_refuses_an_unknown_kind_with_the_nearest():
    with pytest.raises(SpecError, match="there is no record 'Shipp'; did you mean 'Ship'"):
        decode({"kind": "Shipp"})


def test_decode_refuses_what_the_record_would_refuse():
    with pytest.raises(SpecError, match="Ship has no field 'sails'"):
        decode(encode(Ship("argo")) | {"sails": 4})


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
def test_a_record_comes_back_from_json_equal_and_with_its_key(made):
    back = decode(json.loads(json.dumps(encode(made))))
    assert back == made
    assert content_key(back) == content_key(made)


@given(ships, ships)
def test_two_records_share_a_key_only_if_they_mean_the_same(one, two):
    assert (content_key(one) == content_key(two)) == (encode(one) == encode(two) and repr(one) == repr(two))


def test_a_key_does_not_depend_on_the_order_of_names_and_is_long():
    assert content_key({"a": 1, "b": 2}) == content_key({"b": 2, "a": 1})
    assert len(content_key({})) == KEY_LENGTH == 32


def test_a_key_is_the_same_on_every_machine():
    # Were this to change, every finished result of every store would be lost.
    assert content_key(Rows(64)) == "1947f13407d15b6b56b0a0ae133ea659"
    assert content_key(MLM(0.4)) == "9bfb2707ab8fecab8d7cd79bcaffe638"


def test_a_value_that_json_cannot_say_has_no_key():
    with pytest.raises(ValueError):
        content_key({"a": float("nan")})


def test_a_field_that_came_later_changes_no_key_at_its_default():
    plain, told = Classify("{text}", ("a", "b")), Classify("{text}", ("1", "0"), numbered=True)
    assert "numbered" not in encode(plain)
    assert encode(told)["numbered"] is True
    assert decode(encode(told)) == told
    assert decode(encode(plain)) == plain
