"""From jsonl.zst to token files with two processes: biphase beside `datasets.map` and the same tokenizer.

    python benchmarks/tokenize_cpu.py
    python benchmarks/tokenize_cpu.py --text big.jsonl.zst --tokenizer ./folder --megabytes 46

Both start from the same compressed file and end with ids on disk, an end token after each document. Ours also
checks that the fast encoder agrees, splits off held-out text, hashes and publishes. The peer reads with
`load_dataset("json")`; where `zstandard` is not installed it cannot read zst and is given the plain file instead,
which spares it the decompression. Runs alternate; the medians are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from biphase.data.corpus import File, resolve
from biphase.data.documents import texts_of
from biphase.data.shards import Shards
from biphase.data.tokenize import tokenize
from biphase.presets import CORPORA
from biphase.specs import BPE, Corpus, Pretrained
from biphase.store import Store

VOCAB = 32_000


def texts(paths: list[Path]) -> Iterator[str]:
    """Documents of the given files, or of the built-in corpus again and again, each time with other words."""
    corpus = CORPORA["builtin"]
    if paths:
        yield from texts_of(corpus, [File(path.name, path, path.stat().st_size) for path in paths])
        return
    once = list(texts_of(corpus, resolve(corpus).train))
    turn = 0
    while True:
        for number, text in enumerate(once):
            words = text.split(" ")
            words[turn % 7 :: 7] = reversed(words[turn % 7 :: 7])
            yield " ".join(words) + f"\n{turn}.{number}"
        turn += 1


def write_corpus(folder: Path, paths: list[Path], size: int) -> int:
    """corpus.jsonl and corpus.jsonl.zst of about `size` bytes of text; the true count."""
    import pyarrow  # here, because helper processes import this file too

    total = 0
    with (folder / "corpus.jsonl").open("w", encoding="utf-8") as file:
        for text in texts(paths):
            file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
            total += len(text.encode())
            if total >= size:
                break
    raw = (folder / "corpus.jsonl").read_bytes()
    (folder / "corpus.jsonl.zst").write_bytes(pyarrow.Codec("zstd").compress(raw, asbytes=True))
    return total


def ours(source: Path, tokenizer: Path, store: Path, processes: int) -> int:
    corpus = Corpus("bench", str(source), Pretrained(str(tokenizer)))
    shards = Shards.open(tokenize(corpus, Store(store), report=lambda _: None, processes=processes))
    return len(shards.train) + len(shards.heldout)


def peer(source: Path, tokenizer: Path, cache: Path, processes: int) -> int:
    import datasets
    from transformers import AutoTokenizer

    datasets.disable_progress_bars()
    model: Any = AutoTokenizer.from_pretrained(tokenizer)
    end = model.eos_token_id

    def encode(batch: dict[str, Any]) -> dict[str, Any]:
        ids = model(batch["text"], add_special_tokens=False, return_attention_mask=False)["input_ids"]
        return {"ids": [[*one, end] for one in ids]}

    files = str(source) if find_spec("zstandard") else str(source).removesuffix(".zst")
    loaded = datasets.load_dataset("json", data_files=files, split="train", cache_dir=str(cache))
    made = loaded.map(encode, batched=True, num_proc=processes, remove_columns=loaded.column_names)
    table = made.data.table.column("ids")
    return sum(len(chunk.values) for chunk in table.chunks)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, nargs="*", default=[], help="txt, jsonl, jsonl.zst or parquet")
    parser.add_argument(
        "--tokenizer", type=Path, help="a folder with tokenizer.json; else a BPE of 32,000 is trained"
    )
    parser.add_argument("--megabytes", type=float, default=46)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--runs", type=int, default=3)
    asked = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the peer's processes are its parallelism too
    os.environ.setdefault("HF_HUB_OFFLINE", "1")

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        size = write_corpus(folder, asked.text, int(asked.megabytes * 1e6))
        source = folder / "corpus.jsonl.zst"
        kind = Pretrained(str(asked.tokenizer)) if asked.tokenizer else BPE(VOCAB)
        # Made once, outside the clock: the same folder, with an end token, serves both.
        prepared = Corpus("prepare", str(source), kind, tokens=0 if isinstance(kind, BPE) else 1)
        tokenizer = Shards.open(tokenize(prepared, Store(folder / "prepare"), report=print)).tokenizer
        seconds: dict[str, list[float]] = {"biphase": [], "datasets.map": []}
        for run in range(asked.runs):
            for name, function in (("biphase", ours), ("datasets.map", peer)):
                began = time.perf_counter()
                count = function(source, tokenizer, folder / f"{name}-{run}", asked.processes)
                seconds[name].append(time.perf_counter() - began)
                rate = size / seconds[name][-1] / 1e6
                print(f"{name:13} {seconds[name][-1]:6.2f} s  {rate:5.1f} MB/s  {count:,} tokens", flush=True)
    median = {name: statistics.median(all_runs) for name, all_runs in seconds.items()}
    for name, value in median.items():
        print(f"{name:13} median {value:6.2f} s  {size / value / 1e6:5.1f} MB/s of {size / 1e6:.1f} MB")
    print(f"ratio {median['datasets.map'] / median['biphase']:.2f}×")


if __name__ == "__main__":
    main()
