"""What a run starts from and reads: a model, a corpus with its tokenizer, and the packing into rows."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, Literal

from biphase.errors import SpecError, one_line
from biphase.records import added, ranged, record

LONGEST_NAME = 200  # bytes; file systems allow 255, and names get suffixes


def check_name(where: str, name: str) -> None:
    """Raise SpecError unless `name` can be the name of a folder."""
    word = name and PurePath(name).name == name and name != ".."
    if not word or not name.isprintable() or len(name.encode()) > LONGEST_NAME:
        raise SpecError(
            f"{where}: a name is one word without slashes, of at most {LONGEST_NAME} printable bytes, not {name[:40]!r}"
        )


def check_pinned(where: str, revision: str) -> None:
    """Raise SpecError if a revision is a branch: its content can change, so the study would not be reproducible."""
    if revision in ("main", "master") or revision.startswith("refs/"):
        raise SpecError(f"{where}: {revision!r} is a branch and moves; give the commit that its page shows")


HUB = "hf://"


@dataclass(frozen=True)
class HubPlace:
    """The parts of `hf://owner/name@revision/path`; the path may be a pattern, and path and revision may be empty."""

    repository: str
    revision: str
    path: str

    @classmethod
    def of(cls, whose: str, text: str) -> HubPlace:
        owner, _, rest = text.removeprefix(HUB).partition("/")
        repository, _, path = rest.partition("/")
        name, at, revision = repository.partition("@")
        if not owner or not name or bool(at) != bool(revision):
            raise SpecError(f"{whose}: {text!r} is not hf://owner/name@revision/path; correct it")
        check_pinned(whose, f"refs/{path}" if revision == "refs" else revision)
        check_inside(whose, path, text)
        return cls(f"{owner}/{name}", revision, path.rstrip("/"))

    @property
    def address(self) -> str:
        at = f"@{self.revision}" if self.revision else ""
        return f"{HUB}{self.repository}{at}/{self.path}"

    @property
    def name(self) -> str:
        """The repository without its owner: the name of a local copy's folder."""
        return self.repository.split("/")[1]


def check_inside(whose: str, path: str, source: str) -> None:
    """Raise SpecError if a path leaves the repository on the hub that it belongs to."""
    if ".." in PurePosixPath(path).parts or path.startswith(("/", "~")):
        raise SpecError(f"{whose}: {path!r} leaves the repository of {source}; name files inside it")


@record
class Size:
    """A randomly initialized model in EuroBERT's architecture: pre-norm RMSNorm, RoPE, SwiGLU, no biases."""

    name: str
    layers: int = ranged(least=1)
    hidden: int = ranged(least=1)
    heads: int = ranged(least=1)
    kv_heads: int = ranged(least=1)
    ffn: int = ranged(least=1)
    precision: Literal["fp32", "bf16"] = "bf16"  # the default for its runs
    rope_base: float = ranged(10_000.0, above=0)
    norm_eps: float = ranged(1e-5, above=0)
    init_std: float = ranged(0.02, above=0)
    tied: bool = False  # share the embedding with the head

    def check(self) -> None:
        if self.hidden % self.heads or (self.hidden // self.heads) % 2:
            raise SpecError(
                f"Size.hidden ({self.hidden}) must be heads ({self.heads}) times an even head width; "
                f"try hidden={self.heads * 64}"
            )
        if self.heads % self.kv_heads:
            raise SpecError(f"Size.kv_heads ({self.kv_heads}) must divide heads ({self.heads})")

    @property
    def block_parameters(self) -> int:
        """The number of parameters of the layers and the final norm: all but embedding and head."""
        d, kv = self.hidden, self.hidden // self.heads * self.kv_heads
        return self.layers * (2 * d * d + 2 * d * kv + 3 * d * self.ffn + 2 * d) + d


# Fields of a config.json that the corpus's tokenizer decides, or that change no result.
_NOT_SHAPE = re.compile(
    r"vocab_size|\w+_token_id|_name_or_path|transformers_version|(torch_)?dtype|use_cache"
)


@record
class Config:
    """A randomly initialized model of any text architecture that transformers has, causal or not.

    `config` is its config.json: the file, the folder that holds it, or its content as a dict. It must name its
    `model_type`; absent fields have transformers' defaults. The vocabulary size and the ids of special tokens are those
    of the corpus's tokenizer.
    """

    name: str
    config: str | dict[str, Any]  # a dict or a file becomes its JSON text, so that the study says it all
    precision: Literal["fp32", "bf16"] = "bf16"  # the default for its runs

    def __post_init__(self) -> None:
        given = self.config
        if isinstance(given, (str, Path)) and not str(given).startswith("{"):
            path = Path(given).expanduser()
            try:
                given = (path / "config.json" if path.is_dir() else path).read_text(encoding="utf-8")
            except (OSError, ValueError) as wrong:
                raise SpecError(
                    f"Config {self.name!r}: {path} cannot be read ({one_line(wrong)}); give a config.json, or a dict"
                ) from None
        try:
            fields = json.loads(given if isinstance(given, str) else json.dumps(given, allow_nan=False))
            kind = fields["model_type"]
        except (ValueError, TypeError, KeyError) as wrong:
            raise SpecError(
                f"Config {self.name!r} must be JSON with a model_type ({one_line(wrong)}); "
                "write Config('mine', {'model_type': 'modernbert', 'hidden_size': 256, …})"
            ) from None
        if fields.get("auto_map"):
            raise SpecError(
                f"Config {self.name!r} needs code of its own (auto_map), which biphase never runs; remove auto_map if "
                f"transformers has {kind!r}, or give another architecture"
            )
        kept = {name: value for name, value in fields.items() if not _NOT_SHAPE.fullmatch(name)}
        object.__setattr__(self, "config", json.dumps(kept, sort_keys=True, separators=(",", ":")))

    @property
    def fields(self) -> dict[str, Any]:
        """The content of its config.json, without what the tokenizer decides."""
        return json.loads(str(self.config))


@record
class Hub:
    """An existing model to start from: a hub id with its pinned revision, or a local folder.

    Without a revision, the hub's commit at the first run is recorded in the store and used from then on. `gguf` names a file of the folder or repository. `windows` says what sliding-window layers do under
    bidirectional attention: "symmetric" extends the window to both sides, "full" removes it.
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
        check_pinned(f"Hub({self.source!r})", self.revision)
        if self.gguf and (PurePath(self.gguf).name != self.gguf or not self.gguf.endswith(".gguf")):
            raise SpecError(
                f"Hub({self.source!r}): gguf is the name of a file there, as 'model.Q4_1.gguf', not {self.gguf!r}"
            )

    @property
    def local(self) -> bool:
        return self.source.startswith((".", "/", "~"))


@record
class BPE:
    """A byte-level BPE tokenizer of `vocab` entries, including the end and mask tokens.

    It is trained on the corpus that it reads, or on the corpus `on`, so that several corpora have the same one.
    """

    vocab: int = ranged(least=300)  # 256 bytes and the special tokens
    on: Corpus | None = added(None)

    def check(self) -> None:
        if self.on and self.on.tokenizer != BPE(self.vocab):
            raise SpecError(
                f"BPE: {self.on.name!r} trains no BPE({self.vocab}); type BPE(…, on={self.on.name}) with its own vocabulary"
            )


@record
class Pretrained:
    """An existing tokenizer: a hub id with its pinned revision, or a local folder or tokenizer.json."""

    source: str
    revision: str = ""
    vocab: int = 0  # its size, so that planning needs no download; 0: unknown

    def check(self) -> None:
        if not self.local and not self.revision:
            raise SpecError(
                f"Pretrained({self.source!r}) needs a revision: type Pretrained({self.source!r}, revision='<commit>')"
            )
        check_pinned(f"Pretrained({self.source!r})", self.revision)

    @property
    def local(self) -> bool:
        return self.source.startswith((".", "/", "~")) or self.source.endswith(".json")


@record
class Corpus:
    """Documents and the tokenizer for them.

    `source` is a file or folder (txt, jsonl, csv, tsv, parquet), or a hub dataset as
    `hf://owner/name@revision/glob`. Held out are the documents whose text hash is 0 modulo 1,000, or the files of
    `heldout`. An end token follows each document; with `bos`, a begin token precedes it.
    """

    name: str
    source: str
    tokenizer: BPE | Pretrained
    text: str = "text"  # the column or JSON field
    heldout: str = ""  # a file, folder or pattern, relative to the folder of `source`
    bos: bool = False
    tokens: int = ranged(0, least=0)  # stop after this many training tokens; 0 takes everything

    def check(self) -> None:
        if not self.source:
            raise SpecError(
                f"Corpus {self.name!r} needs a source: a file, a folder or hf://owner/name@revision/glob"
            )
        if self.hub and not (self.place.revision and self.place.path):
            raise SpecError(
                f"Corpus {self.name!r}: {self.source!r} does not pin its content; "
                "type hf://owner/name@revision/glob, e.g. hf://HuggingFaceFW/fineweb-edu@<commit>/sample/10BT/*.parquet"
            )
        if self.hub:
            check_inside(f"Corpus {self.name!r}", self.heldout, self.source)

    @property
    def hub(self) -> bool:
        return self.source.startswith(HUB)

    @property
    def place(self) -> HubPlace:
        """Its place, if it is on the hub."""
        return HubPlace.of(f"Corpus {self.name!r}", self.source)

    @property
    def reader(self) -> BPE | Pretrained:
        """Its tokenizer, a BPE with the corpus that it is trained on; ids of corpora with equal ones mean the same."""
        own = isinstance(self.tokenizer, BPE) and not self.tokenizer.on
        return BPE(self.tokenizer.vocab, on=self) if own else self.tokenizer


LEAST_SHARE = 1e-6  # of the rows; less would be rounding


@record
class Blend:
    """Several corpora, each for a share of the rows: Blend({web: 3, code: 1}).

    Weights are relative. With a `temperature` T, each is multiplied by tokens ** (1 / T) of its corpus: at 1 the corpora
    are read by their sizes, at a high T alike. 0 leaves the weights as they are.
    """

    sources: tuple[tuple[str | Corpus, float], ...]
    temperature: float = 0.0

    def settle(self) -> None:
        """Bring equal blends into one form: sorted, weights that sum to 1."""
        if self.sources is None:
            return  # refused when the types of fields are checked
        sources = sorted(self.sources, key=lambda item: (_name(item[0]), repr(item[0])))
        total = sum(weight for _, weight in sources)
        # Weights that are normalised already stay as they are: divided again, they could differ in the last digit.
        if total > 0 and abs(total - 1) > 1e-9:
            sources = [(corpus, round(weight / total, 12)) for corpus, weight in sources]
        object.__setattr__(self, "sources", tuple(sources))

    def check(self) -> None:
        names = [_name(corpus) for corpus, _ in self.sources]
        if len({*names}) < max(2, len(names)):
            raise SpecError("Blend needs two or more corpora with different names: Blend({web: 3, code: 1})")
        for name, (_, weight) in zip(names, self.sources, strict=True):
            if weight < LEAST_SHARE:
                raise SpecError(
                    f"Blend: the share of {name!r} must be at least {LEAST_SHARE:g}, it is {weight:g}; "
                    "give it a weight above 0, or leave it out"
                )
        if self.temperature and not 0.01 <= self.temperature <= 1e6:
            raise SpecError(
                f"Blend.temperature must be 0 (the weights alone) or lie between 0.01 and 1e6, it is {self.temperature:g}; try 3"
            )

    @property
    def name(self) -> str:
        """The shares and names, as "75% web + 25% code"."""
        shares = " + ".join(f"{weight * 100:.4g}% {_name(corpus)}" for corpus, weight in self.sources)
        return f"{shares} at temperature {self.temperature:g}" if self.temperature else shares

    def by_size(self, tokens: Sequence[int]) -> Blend:
        """Return the blend with shares in place of its temperature, for corpora of these numbers of tokens."""
        most = max(tokens)  # quotients, since a size to a high power is no float
        return Blend(
            tuple(
                (corpus, weight * (size / most) ** (1 / self.temperature))
                for (corpus, weight), size in zip(self.sources, tokens, strict=True)
            )
        )


def _name(corpus: str | Corpus) -> str:
    return corpus if isinstance(corpus, str) else corpus.name


@record
class Pairs:
    """Text pairs to train embeddings on: a query, and a text that should be found by it, in each row.

    `source` is a file, a folder or a pattern (jsonl, parquet, csv, tsv, also compressed), or
    `hf://owner/name@revision/path`. A column may be given by alternatives: "query|anchor".
    """

    source: str
    query: str = "query|anchor|question"
    positive: str = "positive|document|answer"
    rows: int = ranged(0, least=0)  # only the first so many; 0 takes all

    def check(self) -> None:
        if not self.source or not self.query or not self.positive:
            raise SpecError(
                "Pairs needs a file and two columns: Pairs('./pairs.jsonl', query='question', positive='answer')"
            )
        if self.source.startswith(HUB):
            HubPlace.of("Pairs", self.source)


@record
class Chunks:
    """Packing in chunks: each row of `length` tokens is cut into two chunks at a random position.

    The cut is uniform in [shortest, length − shortest]. Attention and positions stay inside a chunk, which may contain
    several documents.
    """

    length: int = 2048
    shortest: int = ranged(12, least=1)

    def check(self) -> None:
        if self.length < 2 * self.shortest:
            raise SpecError(
                f"Chunks.length ({self.length}) must be at least twice shortest ({self.shortest})"
            )

    @property
    def fixed_segments(self) -> bool:
        """Whether every row has the same number of segments."""
        return True

    @property
    def share_with_neighbour(self) -> float:
        """The share of tokens that are followed by another one of their segment."""
        return (self.length - 2) / self.length

    @property
    def attended_length(self) -> float:
        """The length of the segment that a token attends within, as the mean over tokens and cuts."""
        low, high = self.shortest, self.length - self.shortest
        squares = sum(cut * cut for cut in range(low, high + 1))  # r and length − r are equally likely
        return 2 * squares / (high - low + 1) / self.length


@record
class Rows:
    """Packing into whole rows of `length` tokens.

    With `document_mask`, attention and positions stay inside a document.
    """

    length: int = ranged(2048, least=2)
    document_mask: bool = False

    @property
    def fixed_segments(self) -> bool:
        """Whether every row has the same number of segments."""
        return not self.document_mask

    @property
    def share_with_neighbour(self) -> float:
        """The share of tokens that are followed by another one of their row; documents inside it are not counted."""
        return (self.length - 1) / self.length

    @property
    def attended_length(self) -> float:
        """The length that a token attends within; an upper bound with `document_mask`, which depends on the text."""
        return self.length


Packing = Chunks | Rows
