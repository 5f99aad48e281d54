"""A corpus as the command line says it, and the fingerprints of what a study names."""

import pytest

from biphase import BPE, CORPORA, LLAMA3, Corpus, Hub, Pretrained
from biphase.errors import SpecError
from biphase.store import Store
from biphase.study.load import corpus_named, tokenizer_named
from biphase.study.plan import identities


def test_known_corpora_come_by_name_with_another_tokenizer_if_said():
    assert corpus_named("builtin") == CORPORA["builtin"]
    assert corpus_named("builtin", tokenizer="bpe:500", text="body").tokenizer == BPE(500)
    assert corpus_named("fineweb-edu").tokenizer == LLAMA3


def test_a_path_is_a_corpus(tmp_path):
    (tmp_path / "my texts.jsonl").touch()
    made = corpus_named(str(tmp_path / "my texts.jsonl"), tokenizer="bpe:500")
    assert made == Corpus("my-texts.jsonl", str(tmp_path / "my texts.jsonl"), BPE(500))


def test_tokenizers_are_said_in_four_ways(tmp_path, monkeypatch):
    (tmp_path / "words").mkdir()
    monkeypatch.chdir(tmp_path)
    assert tokenizer_named("bpe:32000") == BPE(32_000)
    assert tokenizer_named("llama3") == LLAMA3
    assert tokenizer_named("words") == Pretrained("./words")
    assert tokenizer_named("owner/name@abc") == Pretrained("owner/name", revision="abc")
    assert tokenizer_named(Pretrained("./mine")) == Pretrained("./mine")
    with pytest.raises(SpecError, match="needs a revision"):
        tokenizer_named("owner/name")


def test_a_hub_model_is_its_pinned_revision_and_a_folder_its_content(tmp_path):
    known = identities(Store(tmp_path / "store"))
    one, two = Hub("owner/model", revision="a"), Hub("owner/model", revision="b")
    assert known.hub(one) == known.hub(one) != known.hub(two)
    for name, data in (("one", b"x"), ("same", b"x"), ("other", b"y")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_bytes(data)
    keys = {name: known.hub(Hub(str(tmp_path / name))) for name in ("one", "same", "other")}
    assert keys["one"] == keys["same"] != keys["other"]
    with pytest.raises(SpecError, match="no safetensors"):
        known.hub(Hub(str(tmp_path / "nowhere")))


def test_a_folder_is_everything_that_loading_reads_and_nothing_else(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"x")

    def now():
        return identities(Store(tmp_path / "store")).hub(Hub(str(tmp_path)))

    seen = [now()]
    for name in ("README.md", "generation_config.json", "preprocessor_config.json"):
        (tmp_path / name).write_text("{}")
        assert now() == seen[0], name
    for name in ("adapter_config.json", "adapter_model.safetensors", "model.safetensors.index.json"):
        for said in ('{"lora_alpha": 8}', '{"lora_alpha": 16}'):
            (tmp_path / name).write_text(said)
            seen.append(now())
    assert len(set(seen)) == 7


def test_pickled_weights_are_refused_with_how_to_make_others(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(SpecError, match="pickled") as refused:
        identities(Store(tmp_path / "store")).hub(Hub(str(tmp_path)))
    assert "save_pretrained" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_gguf_is_its_content_and_nothing_beside_it(tmp_path):
    known = identities(Store(tmp_path / "store"))
    for name, data in (("one", b"x"), ("same", b"x"), ("other", b"y")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "m.gguf").write_bytes(data)
    (tmp_path / "same" / "config.json").write_text("{}")
    keys = {name: known.hub(Hub(str(tmp_path / name), gguf="m.gguf")) for name in ("one", "same", "other")}
    assert keys["one"] == keys["same"] != keys["other"]
    with pytest.raises(SpecError, match=r"n\.gguf.*there is no such file"):
        known.hub(Hub(str(tmp_path / "one"), gguf="n.gguf"))


def test_a_file_of_a_hub_repository_is_another_model(tmp_path):
    known = identities(Store(tmp_path))
    plain = Hub("owner/model", revision="a")
    files = [Hub("owner/model", revision="a", gguf=f"{name}.gguf") for name in ("q4", "q8")]
    assert len({known.hub(one) for one in (plain, *files)}) == 3
