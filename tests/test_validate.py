"""`biphase validate` finds links and folders that do not do what a run needs, and says what it could not test."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from biphase import validate
from biphase.cluster.machines import ALONE
from biphase.doctor import Diagnosis
from biphase.store import Store, wait_for
from biphase.training import distributed
from biphase.training.distributed import Ranks
from biphase.validate import Validation


@pytest.fixture
def together(tmp_path, monkeypatch):
    """Run checks in two processes that have joined; gives the rows of both, by name."""
    monkeypatch.setattr(validate, "BUCKET", 2**12)
    monkeypatch.setattr(validate, "DISK_BYTES", 2**12)
    monkeypatch.setattr(validate, "ROUNDS", 3)

    def run(check):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]

        def child(rank: int) -> None:
            place = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": 2,
                "LOCAL_WORLD_SIZE": 2,
                "MASTER_PORT": port,
            }
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "CUDA_VISIBLE_DEVICES": ""} | {
                name: str(value) for name, value in place.items()
            }
            rows = check(distributed.join())
            (tmp_path / f"rows-{rank}").write_text(
                json.dumps([[row.name, row.ok, row.detail] for row in rows])
            )
            distributed.leave(0)

        context = multiprocessing.get_context("fork")
        children = [context.Process(target=child, args=(rank,)) for rank in range(2)]
        for each in children:
            each.start()
        for each in children:
            each.join(60)
            assert each.exitcode == 0
        found = [json.loads((tmp_path / f"rows-{rank}").read_text()) for rank in range(2)]
        return [{name: (ok, detail) for name, ok, detail in rows} for rows in found]

    return run


def test_two_processes_with_one_folder_pass_and_the_missing_gpu_is_named(together, tmp_path):
    def check(ranks: Ranks) -> list[Diagnosis]:
        return validate.check_links(ranks, 0) + validate.check_folder(ranks, tmp_path / "store")

    for rows in together(check):
        assert {name for name, (ok, _) in rows.items() if ok} == {
            "gloo",
            "folder",
            "locks",
            "visible",
            "sync",
        }
        assert rows["nccl"][1].startswith(validate.NOT_CHECKED)


def test_processes_with_two_folders_are_found(together, tmp_path):
    for rows in together(lambda ranks: validate.check_folder(ranks, tmp_path / str(ranks.rank), 0.5)):
        assert rows["folder"][0] is False
        assert "2 of 2" in rows["folder"][1]
        assert rows["visible"][0] is False
        assert rows["locks"][0] is None


@pytest.mark.parametrize("kind", ["int32", "float64"])
def test_a_wrong_sum_is_found(together, kind):
    def check(ranks: Ranks) -> list[Diagnosis]:
        right = dist.all_reduce

        def wrong(tensor, *more, **options):
            work = right(tensor, *more, **options)
            if ranks.rank == 1 and str(tensor.dtype) == f"torch.{kind}" and tensor.numel() > 8:
                tensor[8] += 1
            return work

        dist.all_reduce = wrong
        return validate.check_links(ranks, 0)

    for rows in together(check):
        assert rows["gloo"][0] is False
        assert os.uname().nodename in rows["gloo"][1]


def test_a_machine_that_cannot_write_to_the_store_is_named(together, tmp_path):
    def check(ranks: Ranks) -> list[Diagnosis]:
        os.environ["LOCAL_RANK"] = "0"  # each process stands for a machine
        return validate.check_machines(ranks, Store(tmp_path if ranks.first else "/proc/none"), 1)

    for rows in together(check):
        assert rows["store"][0] is False
        assert "/proc/none" in rows["store"][1]
        assert "disk" in rows


def test_a_link_that_is_slower_than_half_of_what_was_typed_fails(together):
    for rows in together(lambda ranks: validate.check_links(ranks, 1e6)):
        assert rows["gloo"][0] is False
    for rows in together(lambda ranks: validate.check_links(ranks, 1e-6)):
        assert rows["gloo"][0] is True


def test_the_page_has_80_columns_and_names_what_failed_and_what_was_not_checked():
    rows = [
        Diagnosis("gloo", True, "sums are right"),
        Diagnosis("nccl", None, f"{validate.NOT_CHECKED}no GPU here"),
        Diagnosis("folder", False, "two processes created one file; " * 5, "use another"),
    ]
    validation = Validation(Store("store"), 2, ALONE)
    lines = validation.page(rows).splitlines()
    assert max(map(len, lines)) <= 80
    assert "failed: folder" in lines[-1]
    assert lines[-1].endswith("nccl")
    facts = validation.facts(rows)
    assert (facts["well"], len(facts["checks"])) == (False, 3)


@pytest.mark.campaign
@pytest.mark.parametrize("processes", [1, 2])
def test_a_machine_is_validated_and_the_store_is_left_as_it_was(tmp_path, processes):
    store = tmp_path / "store"
    words = ["validate", "--store", store, "--processes", processes, "--json"]
    ended = subprocess.run(
        [sys.executable, "-m", "biphase", *map(str, words)], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    checks = {check["name"]: check for check in json.loads(ended.stdout)["checks"]}
    assert checks["resume"]["ok"] is True
    assert "same bits" in checks["resume"]["detail"]
    assert checks["shard"]["ok"] is (True if processes == 2 else None)
    assert not Path(store).exists()


@pytest.mark.campaign
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_validation_leaves_nothing(tmp_path, number):
    store, temporary = tmp_path / "store", tmp_path / "temporary"
    temporary.mkdir()
    child = subprocess.Popen(
        [sys.executable, "-m", "biphase", "validate", "--store", store, "--processes", "2"],
        env=os.environ | {"TMPDIR": str(temporary)},
        start_new_session=True,
    )
    assert wait_for(lambda: any(store.glob(".validate-*/calm/studies")))
    os.killpg(child.pid, number)
    assert child.wait(30) == 128 + number
    assert not store.exists()
    assert not list(temporary.iterdir())
