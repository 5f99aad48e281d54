"""Tensors in files, whole and in parts: what was written is what is read, and a gap is never filled in silence."""

import hashlib
import json

import pytest
import torch
from safetensors.torch import load_file

from biphase.errors import StoreError
from biphase.training.tensors import RowRange, Tensors, join_parts, write, write_part

WEIGHTS = {
    "matrix": torch.arange(35, dtype=torch.float32).view(7, 5),
    "half": torch.linspace(-1, 1, 12).view(6, 2).bfloat16(),
    "count": torch.tensor(3.0),
    "numbers": torch.arange(4),
    "none": torch.empty(0, 3),
}


def cut(tensor, number, of):
    """The rows of process `number`, as FSDP cuts them."""
    most = -(-len(tensor) // of)
    return RowRange(
        tensor[number * most : (number + 1) * most], tuple(tensor.shape), min(number * most, len(tensor))
    )


def write_parts(folder, of):
    for number in range(of):
        rows = {name: cut(one, number, of) for name, one in WEIGHTS.items() if one.ndim}
        rows = {name: one for name, one in rows.items() if one.tensor.numel() or number == 0}
        if number == 0:
            rows["count"] = RowRange.all_of(WEIGHTS["count"])
        write_part(folder, "model", number, of, rows)


def same(one, two):
    return one.keys() == two.keys() and all(
        one[name].dtype == two[name].dtype and torch.equal(one[name], two[name]) for name in one
    )


def whole(folder):
    with Tensors(folder, "model") as saved:
        return {name: saved.whole(name) for name in saved.shapes}


def test_a_file_is_one_that_others_read_and_its_entry_is_true(tmp_path):
    entry = write(tmp_path / "model.safetensors", WEIGHTS)
    content = (tmp_path / "model.safetensors").read_bytes()
    assert entry == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert same(load_file(tmp_path / "model.safetensors"), WEIGHTS)
    assert same(whole(tmp_path), WEIGHTS)


@pytest.mark.parametrize("of", [1, 2, 3, 9])
def test_parts_make_up_the_whole_and_any_rows_of_it(tmp_path, of):
    write_parts(tmp_path, of)
    assert same(whole(tmp_path), WEIGHTS)
    with Tensors(tmp_path, "model") as saved:
        for first, until in ((0, 7), (2, 3), (1, 6), (3, 3), (6, 7)):
            assert torch.equal(saved.rows("matrix", first, until), WEIGHTS["matrix"][first:until])


def test_parts_are_put_together_a_tensor_at_a_time(tmp_path):
    write_parts(tmp_path, 3)
    entry = join_parts(tmp_path, "model")
    assert entry["sha256"] == hashlib.sha256((tmp_path / "model.safetensors").read_bytes()).hexdigest()
    assert same(load_file(tmp_path / "model.safetensors"), WEIGHTS)


def test_missing_parts_and_parts_of_two_launches_are_refused(tmp_path):
    write_parts(tmp_path, 3)
    index = tmp_path / "model-1-of-3.json"
    text = index.read_text()
    index.unlink()
    with pytest.raises(StoreError, match="has not all parts of its model"):
        whole(tmp_path)
    index.write_text(text)
    write_parts(tmp_path, 2)
    with pytest.raises(StoreError, match="has not all parts"):
        whole(tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"first": 0}, "has not all rows of matrix"),
        ({"first": 9}, "has not all rows of matrix"),
        ({"first": "x"}, "is no index"),
        ({"shape": [7, 4]}, "disagrees"),
        ({"shape": [8, 5]}, "disagrees"),
    ],
)
def test_an_index_that_lies_is_refused(tmp_path, change, said):
    write_parts(tmp_path, 2)
    index = json.loads((tmp_path / "model-1-of-2.json").read_text())
    index["tensors"]["matrix"] |= change
    (tmp_path / "model-1-of-2.json").write_text(json.dumps(index))
    with pytest.raises(StoreError, match=said):
        whole(tmp_path)
