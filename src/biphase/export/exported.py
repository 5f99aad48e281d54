"""What an export leaves behind, for whoever asked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from biphase.export.writing import Written


@dataclass(frozen=True)
class Exported:
    folder: Path
    written: Written
    onnx: bool
    note: str = ""

    def words(self) -> str:
        attention = (
            f" (with attn_implementation={self.written.attention!r})" if self.written.attention else ""
        )
        more = " and ONNX" if self.onnx else ""
        note = f"\n{self.note}" if self.note else ""
        needs = f"\n{self.written.needs}" if self.written.needs else ""
        return (
            f"{self.folder}: {self.written.architecture}{more}; read again by transformers{attention}, its numbers "
            f"differ by at most {self.written.deviation:.0e} of their size{note}{needs}"
        )
