"""What a run starts from and reads: a model, a corpus with its tokenizer, and how rows are cut from it."""

from __future__ import annotations

from pathlib import Path, PurePath
from typing import Literal

from biphase.errors import SpecError
from biphase.records import record
from biphase.specs.checks import pinned, positive


@record
class Size:
    """A model from scratch, in EuroBERT's shape: pre-norm, RMSNorm, rotary, SwiGLU, no bias."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    precision: Literal["fp32", "bf16", "fp8"] = "bf16"  # the one it is normally trained in
    rope_base: float = 10_000.0
    norm_eps: float = 1e-5
    init_std: float = 0.02
    tied: bool = False  # share the embedding with the head

    def check(self) -> None:
        for name in ("layers", "hidden", "heads", "kv_heads", "ffn"):
            positive(self, name)
        if self.hidden % self.heads or (self.hidden // self.heads) % 2:
            raise SpecError(
                f"Size.hidden ({self.hidden}) must be heads ({self.heads}) times an even head width; "
                f"try hidden={self.heads * 64}"
            )
        if self.heads % self.kv_heads:
            raise SpecError(f"Size.kv_heads ({self.kv_heads}) must divide heads ({self.heads})")
        if min(self.rope_base, self.norm_eps, self.init_std) <= 0:
            raise SpecError("Size.rope_base, norm_eps and init_std must be positive")

    @property
    def block_parameters(self) -> int:
        """Parameters of the layers and the final norm: everything but embedding and head."""
        d, kv = self.hidden, self.hidden // self.heads * self.kv_heads
        return self.layers * (2 * d * d + 2 * d * kv + 3 * d * self.ffn + 2 * d) + d


@record
class Hub:
    """An existing model to continue from: a hub id with its pinned revision, or a local folder.

    Without a revision, the commit that the hub shows when the study first runs is noted in the store and stays.
    `gguf` names a file of that folder or repository. `windows` says what becomes of layers that see only a window of
    past tokens, where attention goes both ways: a window to both sides, or everything.
    """

    source: str
    revision: str = ""
    gguf: str = ""
    windows: Literal["symmetric", "full"] = "symmetric"

    def check(self) -> None:
        if not self.source:
            raise SpecError(
                "Hub needs a model: Hub('HuggingFaceTB/SmolLM2-135M', revision='…') or Hub('./folder')"
            )
        pinned(f"Hub({self.source!r})", self.revision)
        if self.gguf and (PurePath(self.gguf).name != self.gguf or not self.gguf.endswith(".gguf")):
            raise SpecError(
                f"Hub({self.source!r}): gguf is the name of a file there, as 'model.Q4_1.gguf', not {self.gguf!r}"
            )

    @property
    def local(self) -> bool:
        return self.source.startswith((".", "/", "~"))

    @property
    def address(self) -> dict[str, str]:
        """What transformers' `from_pretrained` takes to find it."""
        more = {"gguf_file": self.gguf} if self.gguf else {}
        if self.local:
            return {"pretrained_model_name_or_path": str(Path(self.source).expanduser()), **more}
        return {"pretrained_model_name_or_path": self.source, "revision": self.revision, **more}


@record
class BPE:
    """A byte-level BPE of `vocab` entries (the end and mask tokens among them), trained on the corpus."""

    vocab: int

    def check(self) -> None:
        if self.vocab < 300:
            raise SpecError(f"BPE.vocab is {self.vocab}; 256 bytes and the special tokens need at least 300")


@record
class Pretrained:
    """An existing tokenizer: a hub id with its pinned revision, or a local folder or tokenizer.json."""

    source: str
    revision: str = ""
    vocab: int = 0  # its size, where the plan should know it without a download

    def check(self) -> None:
        if not self.local and not self.revision:
            raise SpecError(
                f"Pretrained({self.source!r}) needs a revision: type Pretrained({self.source!r}, revision='<commit>')"
            )
        pinned(f"Pretrained({self.source!r})", self.revision)

    @property
    def local(self) -> bool:
        return self.source.startswith((".", "/", "~")) or self.source.endswith(".json")


@record
class Corpus:
    """Documents and the tokenizer that reads them.

    `source` is a file or folder (txt, jsonl, jsonl.zst, parquet), or a hub dataset as
    `hf://owner/name@revision/glob`. Held-out text is every document whose text hash is 0 modulo 1,000,
    or the files of `heldout`. A document ends with the end token; none begins with one unless `bos`.
    """

    name: str
    source: str
    tokenizer: BPE | Pretrained
    text: str = "text"  # the column or JSON field
    heldout: str = ""  # a file or folder, relative to where `source` stands
    bos: bool = False
    tokens: int = 0  # stop after this many training tokens; 0 takes everything

    def check(self) -> None:
        if not self.source:
            raise SpecError(
                f"Corpus {self.name!r} needs a source: a file, a folder or hf://owner/name@revision/glob"
            )
        if self.tokens < 0:
            raise SpecError(f"Corpus.tokens must not be negative, it is {self.tokens}")
        if self.hub and ("@" not in self.source or self.source.count("/") < 4):
            raise SpecError(
                f"Corpus {self.name!r}: {self.source!r} does not pin its content; "
                "type hf://owner/name@revision/glob, e.g. hf://HuggingFaceFW/fineweb-edu@<commit>/sample/10BT/*.parquet"
            )
        if self.hub:
            pinned(f"Corpus {self.name!r}", self.source.split("@")[1].split("/")[0])

    @property
    def hub(self) -> bool:
        return self.source.startswith("hf://")


@record
class Chunks:
    """The paper's packing: each row of `length` tokens is cut in two at r, uniform in
    [shortest, length − shortest]; attention and positions stay inside a chunk. Documents may share one."""

    length: int = 2048
    shortest: int = 12

    def check(self) -> None:
        if self.shortest < 1 or self.length < 2 * self.shortest:
            raise SpecError(
                f"Chunks.length ({self.length}) must be at least twice shortest ({self.shortest})"
            )


@record
class Rows:
    """Whole rows of `length` tokens; with `document_mask`, attention and positions stay inside a document."""

    length: int = 2048
    document_mask: bool = False

    def check(self) -> None:
        if self.length < 2:
            raise SpecError(f"Rows.length must be at least 2, it is {self.length}")
