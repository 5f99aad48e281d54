"""Memory of a retrieval worker for each document that it searches, held in memory or mapped from files.

    python benchmarks/documents_memory.py 300000

Invented documents of MS MARCO's mean length are read and tokenized in a process for each way. Memory is what a
process holds of its own (RssAnon); mapped files are shared by the workers of a machine and counted by their size.
"""

import json
import random
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

MSMARCO = 8_841_823
WORDS = 56  # of a passage of MS MARCO, on average


def write(folder: Path, count: int) -> None:
    draw = random.Random(0)
    vocabulary = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(2, 9))) for _ in range(30_000)]
    (folder / "qrels").mkdir(parents=True)
    with (folder / "corpus.jsonl").open("w") as file:
        for number in range(count):
            file.write(
                json.dumps({"_id": str(number), "text": " ".join(draw.choices(vocabulary, k=WORDS))}) + "\n"
            )
    with (folder / "queries.jsonl").open("w") as file:
        file.writelines(
            json.dumps({"_id": f"q{number}", "text": vocabulary[number]}) + "\n" for number in range(100)
        )
    rows = "".join(f"q{number}\t{number * 7}\t1\n" for number in range(100))
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + rows)


def held() -> int:
    return int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024


def measure(folder: Path, way: str) -> None:
    """Print bytes of memory and of mapped files for each document, in this process."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    from biphase.finetune.families import family_of
    from biphase.specs import Retrieve, Splits, Task
    from biphase.tasks import load as loading
    from biphase.tasks.encode import Tokenization

    loading.LARGE_BYTES = 2**62 if way == "in memory" else 0
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    texts = (
        json.loads(line)["text"]
        for line, _ in zip((folder / "corpus.jsonl").open(), range(2_000), strict=False)
    )
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=32_000, show_progress=False))
    task = Task(
        "ir",
        Retrieve(document="{text}"),
        str(folder),
        Splits("", "", "qrels/test*", cut=0.5, cut_from="test"),
        steps=0,
    )
    folders: dict[str, Path] = {}

    def keep(what: str, build: Callable[[Path], None]) -> Path:
        folders[what] = folder / f"kept {what}"
        if not folders[what].exists():
            folders[what].mkdir()
            build(folders[what])
        return folders[what]

    def fill() -> object:
        examples = loading.load(task, documents="all", keep=keep)
        return family_of(
            task,
            examples,
            Tokenization(tokenizer, (0,), (1,), 512, "x"),
            protocol="standard",
            keep=keep,
            recall=lambda compute: None,
        )

    before = held()
    family = fill()
    count = len(family.documents)
    sizes = {what: sum(path.stat().st_size for path in each.iterdir()) for what, each in folders.items()}
    files, ids = sum(sizes.values()), sizes.get("ids x", 0)
    own = max(0, held() - before) / count
    peak = max(0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before) / count
    print(
        f"{way}: {own:,.0f} bytes of memory a document ({peak:,.0f} at the peak, with mapped pages), "
        f"{own * MSMARCO / 1e9:.2f} GB a worker for MS MARCO; files {files / count:,.0f} bytes, of which the search reads {ids / count:,.0f}: "
        f"{ids / count * MSMARCO / 1e9:.2f} GB a machine",
        flush=True,
    )


if __name__ == "__main__":
    if len(sys.argv) == 3:
        measure(Path(sys.argv[2]), sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as name:
            write(Path(name), int(sys.argv[1]))
            for way in ("in memory", "writing the files", "mapped"):
                subprocess.run([sys.executable, __file__, way, name], check=True)
