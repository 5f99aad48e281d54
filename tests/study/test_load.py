"""Study files, corpora, tokenizers, models and pins, as the command line names them."""

import json
from pathlib import Path

import pytest

from biphase import BPE, CLM, MLM, WSD, Corpus, Hub, Pretrain, Pretrained, Stage, Study
from biphase.errors import SpecError, StoreError
from biphase.presets import CORPORA, LLAMA3, SIZES
from biphase.store import Store
from biphase.study.load import commit_of, corpus_named, load, pinned, run_named, studies_of, tokenizer_named
from biphase.study.plan import identities

# ---------------------------------------------------------------- study files


STUDY = Study("mine", (Pretrain("clm", SIZES["610m"], "fineweb-edu", (Stage(CLM(), 9_000),)),))
GOOD = '''"""Does it work?

More words.
"""
from biphase import *

study = Study("mine", (Pretrain("clm", SIZES["610m"], "fineweb-edu", Stage(CLM(), 9_000)),))
'''


def refusal(path):
    with pytest.raises(SpecError) as refused:
        load(path)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def written(folder, text, name="mine.py"):
    path = folder / name
    path.write_text(text)
    return path


def test_a_study_file_gives_its_study_and_its_question(tmp_path):
    loaded = load(str(written(tmp_path, GOOD)))
    assert (loaded.study, loaded.question) == (STUDY, "Does it work?")


def test_the_studies_of_a_paper_are_named_by_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = [load(path).study.name for path in studies_of("detour")]
    assert names == ["detour", "detour-small", "detour-gpu"]
    assert load("papers/detour/").study == load(Path("papers/detour")).study
    assert "'detuor'; did you mean 'detour'" in refusal("papers/detuor")
    assert "'tiny'; known: small, gpu" in refusal("papers/detour/tiny")
    own = tmp_path / "papers"
    own.mkdir()
    assert load(str(written(own, GOOD))).study == STUDY  # a file of one's own in a folder of that name


WRONG = {
    "a wrong value in a function": (
        "from biphase import *\ndef make(r):\n    return MLM(r)\n\nmake(0.4)\nmake(40.0)\n", 3, "mean 0.4?",
    ),
    "many lines": ("raise ValueError('one\\ntwo')\n", 1, "one two"),
    "an exit": ("x = 1\nraise SystemExit(3)\n", 2, "SystemExit: 3"),
    "a syntax error": ("x = 1\nstudy = Study(\n", 2, "SyntaxError"),
    "a null byte": ("x = '\0'\n", 1, "null bytes"),
    "an error elsewhere": (
        "import json\n\ndef read():\n    return json.loads('{')\n\nread()\n", 4, "JSONDecodeError",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_an_error_in_the_file_names_the_line(tmp_path, case):
    text, line, words = WRONG[case]
    path = written(tmp_path, text)
    said = refusal(path)
    assert said.startswith(f"{path}:{line}: ")
    assert words in said


@pytest.mark.parametrize(
    ("name", "content", "fact"),
    [
        ("mine.py", b"study = []\n", "list, not"),
        ("mine.py", b"\xff\xfe\x00", "cannot be"),
        ("study.yaml", b"x", ".py"),
    ],
)
def test_a_file_that_is_no_study_is_refused(tmp_path, name, content, fact):
    (tmp_path / name).write_bytes(content)
    assert fact in refusal(tmp_path / name)


# ---------------------------------------------------------------- corpora, tokenizers and fingerprints


def test_a_corpus_is_a_known_name_or_a_path_with_another_tokenizer_if_said(tmp_path):
    assert corpus_named("builtin") == CORPORA["builtin"]
    assert corpus_named("builtin", tokenizer="bpe:500", text="body").tokenizer == BPE(500)
    assert corpus_named("fineweb-edu").tokenizer == LLAMA3
    path = tmp_path / "my texts.jsonl"
    path.touch()
    assert corpus_named(str(path), tokenizer="bpe:500") == Corpus("my-texts.jsonl", str(path), BPE(500))


def test_tokenizers_are_said_in_four_ways(tmp_path, monkeypatch):
    (tmp_path / "words").mkdir()
    monkeypatch.chdir(tmp_path)
    assert tokenizer_named("bpe:32000") == BPE(32_000)
    assert tokenizer_named("llama3") == LLAMA3
    assert tokenizer_named("words") == Pretrained("./words")
    assert tokenizer_named("owner/name@abc") == Pretrained("owner/name", revision="abc")
    assert tokenizer_named(Pretrained("./mine")) == Pretrained("./mine")
    with pytest.raises(SpecError, match="a revision"):
        tokenizer_named("owner/name")


@pytest.mark.parametrize("gguf", ["", "m.gguf"])
def test_a_hub_model_is_its_pinned_revision_and_a_folder_its_content(gguf, tmp_path):
    known = identities(Store(tmp_path / "store"))
    hubs = [Hub("owner/model", revision=name, gguf=gguf) for name in ("a", "b")]
    others = [Hub("owner/model", revision="a", gguf=f"{name}.gguf") for name in ("q4", "q8")]
    assert len({known.hub(hub) for hub in (*hubs, *others)}) == 4
    for name, data in (("one", b"x"), ("same", b"x"), ("other", b"y")):
        (tmp_path / name).mkdir()
        (tmp_path / name / (gguf or "model.safetensors")).write_bytes(data)
        if not gguf or name == "same":  # of a GGUF nothing beside it counts
            (tmp_path / name / "config.json").write_text("{}")
    keys = {name: known.hub(Hub(str(tmp_path / name), gguf=gguf)) for name in ("one", "same", "other")}
    assert keys["one"] == keys["same"] != keys["other"]
    with pytest.raises(SpecError, match=r"n\.gguf.*such file" if gguf else "no safetensors"):
        known.hub(Hub(str(tmp_path / ("one" if gguf else "nowhere")), gguf=gguf and "n.gguf"))


def test_a_folder_is_everything_that_loading_reads_and_nothing_else(tmp_path):
    def now():
        return identities(Store(tmp_path / "store")).hub(Hub(str(tmp_path)))

    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(SpecError, match=r"pickled.*save_pretrained"):
        now()
    (tmp_path / "model.safetensors").write_bytes(b"x")
    seen = [now()]
    for name in ("README.md", "generation_config.json", "preprocessor_config.json"):
        (tmp_path / name).write_text("{}")
        assert now() == seen[0], name
    for name in ("adapter_config.json", "adapter_model.safetensors", "model.safetensors.index.json"):
        for said in ('{"lora_alpha": 8}', '{"lora_alpha": 16}'):
            (tmp_path / name).write_text(said)
            seen.append(now())
    assert len(set(seen)) == 7


# ---------------------------------------------------------------- models


@pytest.fixture
def bare(tmp_path):
    return Store(tmp_path / "store")


def refused(words, model, store, **how):
    with pytest.raises(SpecError, match=words) as caught:
        run_named(str(model), store, **how)
    assert "\n" not in str(caught.value)


def test_a_folder_is_a_start_by_its_whole_path(bare, tmp_path, monkeypatch):
    folder = tmp_path / "my model"
    folder.mkdir()
    (folder / "a.gguf").touch()
    assert run_named(str(folder), bare, gguf="a.gguf").start == Hub(str(folder), gguf="a.gguf")
    refused(r"b\.gguf;.*--gguf a\.gguf", folder, bare, gguf="b.gguf")
    refused(r"has no config\.json;.*;.*--gguf a\.gguf", folder, bare)
    refused("file there", folder, bare, gguf="../a.gguf")
    (folder / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    made = run_named("./my model", bare, windows="full")
    assert (made.start, made.name, made.stages) == (Hub(str(folder), windows="full"), "my-model", ())
    assert run_named("my model", bare).start == Hub(str(folder))


@pytest.mark.parametrize("model", ["abc12", "a/b/c", "hf://a/b@1", "nowhere"])
def test_what_is_nothing_is_refused_with_what_could_be(bare, model):
    refused("no model.*:.*owner/name@commit,", model, bare)


# ---------------------------------------------------------------- pins


OLD, NEW, OTHER = "1" * 40, "2" * 40, "abcdef0123" * 4
CORPUS = Corpus("words", "./words", Pretrained("./words"))


def write_pins(store: Store, pins: object) -> None:
    store.root.mkdir(parents=True, exist_ok=True)
    (store.root / "pins.json").write_text(pins if isinstance(pins, str) else json.dumps(pins))


def read_pins(store: Store) -> dict:
    return json.loads((store.root / "pins.json").read_text())


def fill_cache(cache: Path, commits: dict[str, str]) -> Path:
    """The hub library's cache as it stands after the newest commits were fetched."""
    for source, commit in commits.items():
        refs = cache / f"models--{source.replace('/', '--')}" / "refs"
        refs.mkdir(parents=True)
        (refs / "main").write_text(commit)
    return cache


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache; the library reads where it is when it is imported."""
    folder = tmp_path / "cache"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder))
    return folder


def trained(name: str, start: Hub | Pretrain) -> Pretrain:
    more = {"corpus": CORPUS} if isinstance(start, Hub) else {}
    return Pretrain(name, start=start, stages=(Stage(MLM(0.4), 4),), schedule=WSD(1e-4, 0, 1), **more)


# ---------------------------------------------------------------- the study


def test_a_pinned_study_names_the_commits_that_the_store_knows(bare):
    write_pins(bare, {"some/model": OLD})
    whole = Hub("some/model", gguf="model.Q4_1.gguf", windows="full")
    base = trained("base", Hub("some/model"))
    going_on = (base, trained("one", base), trained("two", trained("between", base)))
    study = Study("s", (Pretrain("known", start=whole), Pretrain("unknown", start=Hub("no/pin")), *going_on))
    known, unknown, first, one, two = pinned(study, bare, ask=False).runs
    assert known.start == Hub("some/model", OLD, "model.Q4_1.gguf", "full"), "only the revision is filled in"
    assert unknown.start == Hub("no/pin")
    assert first.start == Hub("some/model", OLD)
    assert one.start is two.start.start is first, "they go on from the same record"


def test_asking_pins_for_good_and_without_asking_nothing_is_looked_up(bare, cache):
    fill_cache(cache, {"some/model": f"{OLD}\n"})
    study = Study("s", (Pretrain("one", start=Hub("some/model")), trained("two", Hub("some/model"))))
    assert pinned(study, bare, ask=False) is study
    assert not bare.root.exists()
    write_pins(bare, {"an/other": NEW})
    made = pinned(study, bare, ask=True)
    assert [run.start.revision for run in made.runs] == [OLD, OLD]
    assert read_pins(bare) == {"an/other": NEW, "some/model": OLD}
    (cache / "models--some--model" / "refs" / "main").write_text(NEW)
    assert pinned(study, bare, ask=True) == made == pinned(study, bare, ask=False)


# ---------------------------------------------------------------- without a network


@pytest.mark.parametrize("in_cache", [None, b"", b"main", b"1" * 41, b"\xff\xfe"])
def test_what_is_not_known_offline_is_refused_with_what_to_type(in_cache, bare, cache):
    if in_cache is not None:
        fill_cache(cache, {"some/model": ""})
        (cache / "models--some--model" / "refs" / "main").write_bytes(in_cache)
    for source in ("some/model", "some/model/more"):  # the latter is no name of a model
        with pytest.raises(SpecError) as caught:
            commit_of(source, bare)
        facts = (f"{source}@<commit>", f"Hub('{source}', revision='<commit>')", "local folder")
        assert all(fact in str(caught.value) for fact in facts)
        assert "\n" not in str(caught.value)
    assert not bare.root.exists()


@pytest.mark.parametrize("content", ["{", "[]", '{"some/model": 1}', '{"an/other": "main"}', "\x00"])
def test_a_damaged_list_of_pins_is_refused_and_left_as_it_is(content, bare, cache):
    fill_cache(cache, {"some/model": OLD})
    write_pins(bare, content)
    study = Study("s", (Pretrain("run", start=Hub("some/model")),))
    for ask in (lambda: commit_of("some/model", bare), lambda: pinned(study, bare, ask=False)):
        with pytest.raises(StoreError, match=str(bare.root / "pins.json")):
            ask()
    assert (bare.root / "pins.json").read_text() == content
