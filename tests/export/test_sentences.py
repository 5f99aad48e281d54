"""The exported folder in sentence-transformers and in mteb: our mean, our prompts, our ranking."""

import warnings

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from biphase import Retrieve
from biphase.attention import AttentionPattern
from biphase.export.writing import Prompts, prompts_of

QUERIES = {"q1": "the cat", "q2": "the river", "q3": "two birds"}
DOCUMENTS = {
    "d1": "the cat sees the mountain. the cat likes a small boat",
    "d2": "the river crosses the garden",
    "d3": "a dog remembers two birds. two birds",
    "d4": "our teacher paints the long road",
}


@pytest.fixture(scope="module")
def model(folder):
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu")


@pytest.fixture(scope="module")
def mean(folder, ours):
    """The mean hidden state of a text, all its tokens counted, as a direction."""
    tokenizer, trained = AutoTokenizer.from_pretrained(folder), ours("masked")

    def embed(texts):
        made = []
        for text in texts:
            ids = torch.tensor([tokenizer(text)["input_ids"]])
            with torch.no_grad():
                hidden = trained.hidden(
                    ids, torch.arange(ids.shape[1])[None], AttentionPattern(causal=False)
                )[0]
            made.append(torch.nn.functional.normalize(hidden.mean(0), dim=0).numpy())
        return np.stack(made)

    return embed


def test_encode_is_our_mean_and_our_prompts(model, mean):
    texts = [*QUERIES.values(), *DOCUMENTS.values()]
    assert np.allclose(model.encode(texts, batch_size=3), mean(texts), atol=1e-5)
    for name, before in (("query", "Query: "), ("document", "Document: ")):
        right = mean([f"{before}{text}" for text in texts])
        assert np.allclose(model.encode(texts, prompt_name=name), right, atol=1e-5)
    assert np.allclose(model.encode_query(texts), model.encode(texts, prompt_name="query"))
    assert model.max_seq_length == 32
    assert model.similarity_fn_name == "cosine"


def test_prompts_are_what_stands_before_the_first_column():
    assert prompts_of(Retrieve()) == Prompts("Query: ", "Document: ")
    form = Retrieve(query="{text}", document="Passage, {title}: {text}")
    assert prompts_of(form) == Prompts("", "Passage, ")


def test_mteb_runs_a_task_and_ranks_as_we_do(model, mean, tmp_path):
    import mteb
    from datasets import Dataset
    from mteb.abstasks.retrieval import AbsTaskRetrieval
    from mteb.abstasks.task_metadata import TaskMetadata

    relevant = {"q1": {"d1": 1}, "q2": {"d2": 1, "d4": 1}, "q3": {"d3": 1}}

    class Tiny(AbsTaskRetrieval):
        metadata = TaskMetadata(
            name="TinyRetrieval",
            description="Four documents.",
            reference=None,
            dataset={"path": "in/memory", "revision": "0"},
            type="Retrieval",
            category="t2t",
            modalities=["text"],
            eval_splits=["test"],
            eval_langs=["eng-Latn"],
            main_score="ndcg_at_10",
            date=None,
            domains=None,
            task_subtypes=None,
            license=None,
            annotations_creators=None,
            dialect=None,
            sample_creation=None,
            bibtex_citation=None,
        )

        def load_data(self, **kwargs):
            self.dataset = {
                "default": {
                    "test": {
                        "queries": Dataset.from_list(
                            [{"id": one, "text": text} for one, text in QUERIES.items()]
                        ),
                        "corpus": Dataset.from_list(
                            [{"id": one, "text": text, "title": ""} for one, text in DOCUMENTS.items()]
                        ),
                        "relevant_docs": relevant,
                        "top_ranked": None,
                    }
                }
            }
            self.data_loaded = True

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # mteb and datasets tell of their own future
        said = mteb.evaluate(model, Tiny(), cache=None, co2_tracker=False, show_progress_bar=False)
    scores = said.task_results[0].scores["test"][0]
    assert scores["ndcg_at_10"] == pytest.approx(_ndcg(mean, relevant), abs=1e-4)
    assert 0 < scores["ndcg_at_10"] < 1, "a perfect ranking would not show which one it was"


def _ndcg(mean, relevant):
    """NDCG@10 of our own vectors, by its definition."""
    documents = mean([f"Document: {text}" for text in DOCUMENTS.values()])
    names = list(DOCUMENTS)
    every = []
    for query, text in QUERIES.items():
        order = np.argsort(-(documents @ mean([f"Query: {text}"])[0]), kind="stable")
        gains = [relevant[query].get(names[place], 0) / np.log2(2 + rank) for rank, place in enumerate(order)]
        best = sum(1 / np.log2(2 + rank) for rank in range(len(relevant[query])))
        every.append(sum(gains) / best)
    return float(np.mean(every))
