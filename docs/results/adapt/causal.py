"""The same decoder as it is: fine-tuned and scored with causal attention."""

from dataclasses import replace
from pathlib import Path

from biphase import Study

main: dict = {}
exec((Path(__file__).parent / "study.py").read_text(encoding="utf-8"), main)
study = Study("adapt-causal", runs=(main["decoder"],), finetune=replace(main["grid"], causal=True))
