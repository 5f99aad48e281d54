"""Datasets by name: the paper's twelve (`TASKS`), and more (`MORE_TASKS`). docs/tasks.md explains how to add one.

Sources on the hub are pinned by commit. For two of the paper's own copies (hgissbkh/uner_en and hgissbkh/record) no
commit is known here: they are read from a local folder (`--data`), or from the hub once a commit is named (`Task.pin`).
Instead of the paper's copies of three more datasets and of the MS MARCO training pairs, the public originals are used:
CoNLL-2003 (the paper's copy has 1, 2 and 1 more sentences, made of document marks), OntoNotes 5 and MLDR (hgissbkh's
are re-uploads of these).
"""

from __future__ import annotations

from biphase.records import ByName
from biphase.specs import (
    Answer,
    Choose,
    Classify,
    MultiLabel,
    Regress,
    Retrieve,
    Splits,
    Tag,
    Task,
)

_GLUE = "hf://nyu-mll/glue@bcdcba79d07bc864c1c254ccfcedcce55bcc9a8c"
_PAIRS = "hf://sentence-transformers/msmarco-bm25@f710ec18ffdab0f4a216bb4b2f466d7a04a3a7f2/triplet/train*"
_MSMARCO = "hf://BeIR/msmarco@a918e0d11a77ed33f42f29d98340b655593b96ad"
_MSMARCO_QRELS = "hf://BeIR/msmarco-qrels@253fbf8a3f8d4a0932b63882b5162bedc84779f5"
_NQ = "hf://BeIR/nq@b7253e6c379163d024ddb1d6948152a91a2e3b46"
_NQ_QRELS = "hf://BeIR/nq-qrels@519acd4e48bb3e5da22b2b888ce36c614f4f2bc9"
_SCIFACT = "hf://BeIR/scifact@b3b5335604bf5ee3c4447671af975ea25143d4f5"
_SCIFACT_QRELS = "hf://BeIR/scifact-qrels@2938d17dc3b09882fdb8c12bbbe2e2dc0e75a029"


def _iob(*kinds: str) -> tuple[str, ...]:
    return ("O", *(f"{place}-{kind}" for kind in kinds for place in "BI"))


_FOUR = _iob("PER", "ORG", "LOC", "MISC")
_THREE = _iob("PER", "ORG", "LOC")
# The order of the label numbers in tner/ontonotes5.
_EIGHTEEN = (
    "O", "B-CARDINAL", "B-DATE", "I-DATE", "B-PERSON", "I-PERSON", "B-NORP", "B-GPE", "I-GPE", "B-LAW", "I-LAW",
    "B-ORG", "I-ORG", "B-PERCENT", "I-PERCENT", "B-ORDINAL", "B-MONEY", "I-MONEY", "B-WORK_OF_ART",
    "I-WORK_OF_ART", "B-FAC", "B-TIME", "I-CARDINAL", "B-LOC", "B-QUANTITY", "I-QUANTITY", "I-NORP", "I-LOC",
    "B-PRODUCT", "I-TIME", "B-EVENT", "I-EVENT", "I-FAC", "B-LANGUAGE", "I-PRODUCT", "I-ORDINAL", "I-LANGUAGE",
)  # fmt: skip

# The order of the label numbers in google-research-datasets/go_emotions.
_EMOTIONS = (
    "admiration", "amusement", "anger", "annoyance", "approval", "caring", "confusion", "curiosity", "desire",
    "disappointment", "disapproval", "disgust", "embarrassment", "excitement", "fear", "gratitude", "grief", "joy",
    "love", "nervousness", "optimism", "pride", "realization", "relief", "remorse", "sadness", "surprise", "neutral",
)  # fmt: skip

# 5% of train chooses the rate; the public validation part is reported.
_ON_VALIDATION = Splits(test="validation*")
_OFFICIAL = Splits(validation="validation*")


def _glue(name: str, text: str, labels: tuple[str, ...], splits: Splits = _ON_VALIDATION) -> Task:
    return Task(name, Classify(text, labels), f"{_GLUE}/{name}", splits)


_TITLED = Retrieve(document="Document: {title}. {text}", queries="queries/*", corpus="corpus/*")

TASKS = (
    _glue("sst2", "{sentence}", ("negative", "positive")),
    _glue(
        "mnli",
        "Premise: {premise}\nHypothesis: {hypothesis}",
        ("entailment", "neutral", "contradiction"),
        Splits(test="validation_matched*"),
    ),
    _glue("qqp", "Question 1: {question1}\nQuestion 2: {question2}", ("not_duplicate", "duplicate")),
    Task(
        "conll2003",
        Tag(_FOUR, words="tokens|words", tags="ner_tags|ner|tags"),
        "hf://lhoestq/conll2003@19edcb426bfd625c275c17b9a99b2239243f4377/data",
        _OFFICIAL,
        epochs=1,
    ),
    Task(
        "ontonotes5",
        Tag(_EIGHTEEN, tags="tags"),
        "hf://tner/ontonotes5@cb73f4840c172a93c873e77bb21998d4f668b4bb/dataset",
        Splits(validation="valid*"),
    ),
    Task("uner_en", Tag(_THREE), "hf://hgissbkh/uner_en/data", _OFFICIAL, epochs=1),
    Task(
        "squad",
        Answer(),
        "hf://rajpurkar/squad@7b6d24c440a36b6815f21b70d25016731768db1f/plain_text",
        _ON_VALIDATION,
    ),
    Task(
        "squad_v2",
        Answer(unanswerable=True),
        "hf://rajpurkar/squad_v2@3ffb306f725f7d2ce8394bc1873b24868140c412/squad_v2",
        _ON_VALIDATION,
    ),
    Task("record", Answer(), "hf://hgissbkh/record/data", _ON_VALIDATION),
    Task(
        "msmarco",
        Retrieve(queries="queries/*", corpus="corpus/*", pairs=_PAIRS),
        _MSMARCO,
        Splits(train="", validation=f"{_MSMARCO_QRELS}/dev*", test=f"{_MSMARCO_QRELS}/test*"),
    ),
    Task(
        "nq",
        _TITLED,
        _NQ,
        Splits(train="", test=f"{_NQ_QRELS}/test*", cut=0.5, cut_from="test"),
        trained_on="msmarco",
    ),
    Task(
        "mldr_en",
        Retrieve(queries=""),
        "hf://Shitao/MLDR@d67138e705d963e346253a80e59676ddb418810a/mldr-v1.0-en",
        Splits(train="", validation="dev*", test="test*"),
        trained_on="msmarco",
    ),
)

MORE_TASKS = (
    _glue("rte", "Premise: {sentence1}\nHypothesis: {sentence2}", ("entailment", "not_entailment")),
    _glue("cola", "{sentence}", ("unacceptable", "acceptable")),
    _glue("mrpc", "Sentence 1: {sentence1}\nSentence 2: {sentence2}", ("not_equivalent", "equivalent")),
    _glue("qnli", "Question: {question}\nSentence: {sentence}", ("entailment", "not_entailment")),
    Task(
        "stsb",
        Regress("Sentence 1: {sentence1}\nSentence 2: {sentence2}", "label"),
        f"{_GLUE}/stsb",
        _ON_VALIDATION,
    ),
    Task(
        "go_emotions",
        MultiLabel("{text}", _EMOTIONS),
        "hf://google-research-datasets/go_emotions@add492243ff905527e67aeb8b80c082af02207c3/simplified",
        _OFFICIAL,
    ),
    Task(
        "commonsense_qa",
        Choose("{question}\n{choice}", answer="answerKey"),
        "hf://tau/commonsense_qa@94630fe30dad47192a8546eb75f094926d47e155/data",
        _ON_VALIDATION,
    ),
    Task(
        "swag",
        Choose("{startphrase} {choice}", ("ending0", "ending1", "ending2", "ending3"), answer="label"),
        "hf://allenai/swag@dc48148372b3853a9c7bae7bb06c161b46d8364a/regular",
        _ON_VALIDATION,
    ),
    Task(
        "ag_news",
        Classify("{text}", ("World", "Sports", "Business", "Sci/Tech")),
        "hf://fancyzhx/ag_news@eb185aade064a813bc0b7f42de02595523103ca4/data",
    ),
    Task(
        "boolq",
        Classify("Question: {question}\nPassage: {passage}", ("no", "yes"), label="answer"),
        "hf://google/boolq@35b264d03638db9f4ce671b711558bf7ff0f80d5/data",
        _ON_VALIDATION,
    ),
    Task("wikiann_en", Tag(_THREE), "hf://unimelb-nlp/wikiann/en", _OFFICIAL),
    Task(
        "scifact",
        _TITLED,
        _SCIFACT,
        Splits(train=f"{_SCIFACT_QRELS}/train*", test=f"{_SCIFACT_QRELS}/test*", cut=0.1),
    ),
    # Tiny slices that ship with biphase, for the quickstart and for experiments.
    Task(
        "sources-mini",
        Classify("{text}", ("wikipedia", "elife-digest", "books")),
        "builtin:tasks/sources",
        _OFFICIAL,
    ),
    Task("wikiann-mini", Tag(_THREE), "builtin:tasks/wikiann", _OFFICIAL),
    Task("squadshifts-mini", Answer(), "builtin:tasks/squadshifts", _OFFICIAL),
    Task(
        "scifact-mini",
        Retrieve(document="Document: {title}. {text}"),
        "builtin:tasks/scifact",
        Splits(train="qrels/train*", validation="qrels/validation*", test="qrels/test*"),
    ),
)

CATALOG = ByName("task", {task.name: task for task in (*TASKS, *MORE_TASKS)})
