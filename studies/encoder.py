"""What does an hour of adapting make of a small decoder: an encoder, and an embedding model?

SmolLM2-135M is read as it is, adapted by MNTP, and then trained on questions and passages of MS MARCO. Each of these
models, and all-MiniLM-L6-v2 beside them, searches SciFact without fine-tuning and is fine-tuned on three tasks.
docs/embeddings.md has the same path for a tiny decoder that a laptop trains in minutes.
"""

from dataclasses import replace

from biphase import (
    CATALOG,
    CORPORA,
    MNTP,
    WSD,
    Chunks,
    Claim,
    Contrastive,
    Finetune,
    Hub,
    Pairs,
    Pretrain,
    Pretrained,
    Retrieve,
    Stage,
    Study,
)

smollm2 = Hub("HuggingFaceTB/SmolLM2-135M", revision="93efa2f097d58c2a74874c7e644dbc9b0cee75a2")
pairs = Pairs(
    "hf://sentence-transformers/msmarco-bm25@f710ec18ffdab0f4a216bb4b2f466d7a04a3a7f2/triplet/train*",
    query="query",
    positive="positive",
)

encoder = Pretrain(
    "encoder",
    start=smollm2,
    corpus=replace(
        CORPORA["fineweb-edu-10b"], tokenizer=Pretrained(smollm2.source, revision=smollm2.revision)
    ),
    stages=(Stage(MNTP(0.3), 1_000),),
    packing=Chunks(512),
    batch_tokens=64 * 512,
    schedule=WSD(2e-4, warmup=50, decay=0.2),
    heldout_every=200,
    heldout_tokens=200_000,
)
embedder = Pretrain(
    "embedder",
    start=encoder,
    stages=(Stage(Contrastive((pairs,), batch=512), 1_000),),
    schedule=WSD(1e-4, warmup=0.1, decay=0.2),
    optimizer_state="reset",
)


# Without fine-tuning, and without the prefixes "Query: " and "Document: ", as the pairs are.
plain = Retrieve(query="{text}", document="{title:. }{text}", queries="queries/*", corpus="corpus/*")
search = replace(CATALOG["scifact"], form=plain, steps=0)

study = Study(
    "encoder",
    runs=(
        Pretrain("decoder", start=smollm2),
        encoder,
        embedder,
        Pretrain("minilm", start=Hub("sentence-transformers/all-MiniLM-L6-v2")),
    ),
    finetune=Finetune(
        (search, CATALOG["sst2"], CATALOG["conll2003"], CATALOG["stsb"]),
        lrs=(2e-5, 5e-5, 1e-4),
        seeds=(0, 1, 2),
        protocol="standard",
    ),
    claims=(
        Claim("pairs", "training on pairs improves search", more="embedder", less="encoder", on=("IR",)),
        Claim(
            "kept",
            "it costs no more than a point of tagging",
            more="embedder",
            less="encoder",
            on=("TC",),
            margin=-1,
        ),
    ),
)
