"""Measure what was asked: ours first, then each peer, one after another on an empty device."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from biphase.bench import clock, finetune, pretrain, retrieval, trainer
from biphase.bench.cases import LIKE, Asked, FinetuneCase, Maker, PretrainCase, ScoreCase
from biphase.bench.clock import Measured
from biphase.bench.kernels import Breakdown
from biphase.bench.results import OURS, Compared, Report, cases_of
from biphase.bench.saved import report_of, save
from biphase.bench.tokens import Dataset
from biphase.errors import TrainingError
from biphase.files import Store
from biphase.models.fused.eight import without_eight
from biphase.training import devices

SENTENCES = "sentence-transformers"
WHOLE_ROWS = "the Trainer's attention spans whole rows, which is more work; --packing rows makes it equal"
FEWER_ROWS, SMALLER = "type fewer --rows, or a smaller --size", "type a smaller --size"
LEFT_OUT = "this case is left out"
MANY_ROWS = 1_152  # the paper's step in rows of 2,048: what a micro-batch is cut from


class Measuring:
    """One command: the device, what was asked, and the report that grows."""

    def __init__(self, asked: Asked, device: torch.device, command: str, tell: Callable[[str], None]) -> None:
        self.asked, self.device, self.tell = asked, device, tell
        length = Maker(asked, device.type, 1).length
        self.make = Maker(asked, device.type, devices.micro_rows(device, MANY_ROWS, length))
        self.peers = asked.peers(self.make.place)
        self.report = report_of(device, command)
        self._refuse_missing()
        if poor := devices.poor_precision(device, self.make.precision, "--precision"):
            tell(f"note: {poor}")

    def _refuse_missing(self) -> None:
        """Before anything is measured."""
        if self.make.precision == "fp8" and (why := without_eight(self.device)):
            raise TrainingError(f"--precision fp8 cannot be had ({why}); type --precision bf16")
        subjects = self.asked.subjects()
        if self.peers and set(subjects) & {"pretrain", "finetune", "retrieval"}:
            trainer.refuse_missing("accelerate", "transformers' Trainer")
        if self.peers and "retrieval" in subjects:
            for package in ("sentence_transformers", "datasets"):
                trainer.refuse_missing(package, "sentence-transformers")

    def all(self) -> Report:
        steps = {
            "pretrain": self.pretrain,
            "finetune": self.finetune,
            "retrieval": self.retrieval,
            "scale": self.scale,
        }
        for subject in self.asked.subjects():
            steps[subject]()
        return self.report

    # ------------------------------------------------------------ subjects

    def pretrain(self) -> None:
        case, rows = self.make.pretrain(), self.make.peer_rows()
        sides = {OURS: self._pretrained(case)}
        for peer in self.peers:
            sides[peer] = self._theirs(
                peer, case.title, lambda peer=peer: trainer.pretrain(case, self.device, peer=peer, rows=rows)
            )
        note = WHOLE_ROWS if self.peers and case.packing != "rows" else ""
        about = case.about() | {
            "micro_batches": case.micro_batches,
            "deterministic": case.deterministic,
            "peer_rows": rows,
        }
        self._note(Compared(case.title, "tokens/s", about, sides, note=note))

    def finetune(self) -> None:
        for lengths in LIKE:
            case = self.make.finetune(lengths)
            sides = {OURS: self._tuned(case)}
            for peer in self.peers:
                sides[peer] = self._theirs(
                    peer, case.title, lambda peer=peer, case=case: self._peer(case, peer)
                )
            tokens = Dataset(case).tokens
            self._note(Compared(case.title, "ms/step", case.about() | {"tokens": tokens}, sides))

    def _peer(self, case: FinetuneCase, peer: str) -> Measured:
        return trainer.finetune(case, self.device, peer=peer, rate=finetune.RATE, length=finetune.CONTEXT)

    def retrieval(self) -> None:
        case, device = self.make.retrieval(), self.device
        texts = retrieval.Texts(case)
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            retrieval.write_folder(texts, folder)
            for what, unit, mine, other in (
                ("training", "ms/step", retrieval.train_ours, retrieval.train_sentences),
                ("reading", "passages/s", retrieval.read_ours, retrieval.read_sentences),
            ):
                title = f"{case.title}, training" if what == "training" else f"{case.size} reading passages"
                sides = {OURS: self._ours(title, SMALLER, lambda mine=mine: mine(texts, folder, device))}
                tokens = sides[OURS].tokens
                if self.peers:
                    sides[SENTENCES] = self._theirs(
                        SENTENCES,
                        title,
                        lambda other=other, tokens=tokens: other(texts, folder, device, tokens=tokens),
                    )
                about = case.about() | {"what": what}
                self._note(Compared(title, unit, about, sides, passages=case.passages))

    def scale(self) -> None:
        """Ours alone. A device is known by what it can do: what does not fit is no case of it."""
        cases = self.make.scale()
        works: list[tuple[Any, str, Callable[[], Measured]]] = [
            *(
                (one, "tokens/s", lambda one=one: self._pretrained(one, LEFT_OUT, idle=False))
                for one in cases.pretrain
            ),
            *((one, "ms/step", lambda one=one: self._tuned(one, LEFT_OUT)) for one in cases.finetune),
            *((one, "tokens/s", lambda one=one: self._scored(one)) for one in cases.score),
        ]
        for case, unit, measure in works:
            self._note(Compared(case.title, unit, case.about(), {OURS: measure()}))

    # ------------------------------------------------------------ sides

    def _pretrained(self, case: PretrainCase, advice: str = FEWER_ROWS, *, idle: bool = True) -> Measured:
        keep = self._keeper(case.title)
        return self._ours(
            case.title, advice, lambda: pretrain.measure(case, self.device, idle=idle, profile=keep)
        )

    def _tuned(self, case: FinetuneCase, advice: str = SMALLER) -> Measured:
        keep = self._keeper(case.title)
        return self._ours(case.title, advice, lambda: finetune.measure(case, self.device, profile=keep))

    def _scored(self, case: ScoreCase) -> Measured:
        return self._ours(case.title, LEFT_OUT, lambda: finetune.score(case, self.device))

    def _keeper(self, title: str) -> Callable[[Breakdown], None] | None:
        if not self.asked.profile:
            return None
        return lambda found: self.report.profiles.update({title: found})

    def _ours(self, title: str, advice: str, measure: Callable[[], Measured]) -> Measured:
        self.tell(f"{title}: biphase …")
        return clock.ours(self.device, LEFT_OUT if self.asked.save else advice, measure)

    def _theirs(self, peer: str, title: str, measure: Callable[[], Measured]) -> Measured:
        self.tell(f"{title}: {peer} …")
        return clock.theirs(self.device, measure)

    def _note(self, compared: Compared) -> None:
        self.report.compared.append(compared)


def run(
    asked: Asked, store: Store, *, device: torch.device, command: str, tell: Callable[[str], None]
) -> Report:
    """All that was asked; saved if that was asked too and there is something to save."""
    report = Measuring(asked, device, command, tell).all()
    if asked.save and cases_of(report.compared):
        report.saved = str(save(report, store))
    elif asked.save:
        tell("nothing was saved: no case fits into the memory of this device")
    return report
