"""Whatever is wrong with a study file is said in one line that names the file and the line in it."""

import json
from pathlib import Path

import pytest

from biphase.errors import SpecError
from biphase.presets import SIZES
from biphase.records import encode
from biphase.specs import CLM, Pretrain, Stage, Study
from biphase.store import with_checksum
from biphase.study.load import load

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
    assert (loaded.study, loaded.question, loaded.path) == (STUDY, "Does it work?", tmp_path / "mine.py")


def test_a_study_need_not_ask_a_question(tmp_path):
    assert load(written(tmp_path, GOOD.split('"""')[2])).question == ""


def test_a_study_knows_its_own_file(tmp_path):
    assert load(written(tmp_path, f"{GOOD}\nassert __file__.endswith('mine.py')\n")).study == STUDY


def test_a_plan_is_read_and_not_run(tmp_path):
    text = json.dumps(with_checksum({"question": "why?", "study": encode(STUDY), "jobs": []}))
    loaded = load(written(tmp_path, text, "plan.json"))
    assert (loaded.study, loaded.question) == (STUDY, "why?")


WRONG = {
    "a wrong field": ("from biphase import *\n\nx = MLM(ration=0.4)\n", 3, "MLM has no field 'ration'"),
    "a wrong value in a function": (
        "from biphase import *\ndef make(r):\n    return MLM(r)\n\nmake(0.4)\nmake(40.0)\n",
        3,
        "did you mean 0.4?",
    ),
    "an exception": ("a = 1\nb = [][a]\n", 2, "IndexError: list index out of range"),
    "a wrong name": ("study = Studdy()\n", 1, "NameError: name 'Studdy' is not defined"),
    "a missing preset": (
        "from biphase import SIZES\nSIZES['600m']\n",
        2,
        "there is no size '600m'; did you mean",
    ),
    "a missing module": (
        "import no_such_module\n",
        1,
        "ModuleNotFoundError: No module named 'no_such_module'",
    ),
    "no message": ("raise ValueError\n", 1, "ValueError: no message"),
    "many lines": ("raise ValueError('one\\ntwo')\n", 1, "ValueError: one two"),
    "an exit": ("x = 1\nraise SystemExit(3)\n", 2, "SystemExit: 3"),
    "a syntax error": ("x = 1\nstudy = Study(\n", 2, "SyntaxError: '(' was never closed"),
    "a late syntax error": ("x = 1\nreturn x\n", 2, "SyntaxError: 'return' outside function"),
    "a null byte": ("x = '\0'\n", 1, "null bytes"),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_error_in_the_file_names_the_line(tmp_path, case):
    text, line, words = WRONG[case]
    path = written(tmp_path, text)
    said = refusal(path)
    assert said.startswith(f"{path}:{line}: ")
    assert words in said


def test_the_deepest_line_of_the_file_is_named_even_when_the_error_is_elsewhere(tmp_path):
    path = written(tmp_path, "import json\n\ndef read():\n    return json.loads('{')\n\nread()\n")
    assert refusal(path).startswith(f"{path}:4: JSONDecodeError: ")


def test_a_file_without_a_study_is_refused(tmp_path):
    assert "has no variable `study`; end it with study = Study(" in refusal(written(tmp_path, "x = 1\n"))


def test_a_study_that_is_no_study_is_refused(tmp_path):
    assert "`study` is a list, not a Study" in refusal(written(tmp_path, "study = []\n"))


def test_a_file_that_is_not_text_is_refused(tmp_path):
    path = tmp_path / "mine.py"
    path.write_bytes(b"\xff\xfe\x00")
    assert "cannot be read" in refusal(path)


def test_another_kind_of_file_is_refused(tmp_path):
    assert "a study is a Python file (.py), or the plan.json" in refusal(written(tmp_path, "x", "study.yaml"))


def test_a_folder_is_refused_with_a_file_in_it(tmp_path):
    assert refusal(tmp_path) == f"{tmp_path} is a folder; type a study file in it"
    path = written(tmp_path, GOOD)
    assert refusal(tmp_path).endswith(f"e.g. {path}")


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("studies").mkdir()
    for name in ("two_stage.py", "paper.py"):
        Path("studies", name).write_text(GOOD)
    return tmp_path


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("studies/two_stag.py", "studies/two_stage.py"),
        ("studies/two_stage", "studies/two_stage.py"),
        ("two_stage.py", "studies/two_stage.py"),
        ("paper", "studies/paper.py"),
        ("study/papr.py", "studies/paper.py"),
    ],
)
def test_the_file_that_was_meant_is_proposed(project, typed, meant):
    assert refusal(typed) == f"no file {typed}; did you mean {meant}?"


def test_without_a_close_name_another_study_is_shown(project):
    assert refusal("studies/quantum.py").startswith("no file studies/quantum.py; there is studies/")


def test_where_there_are_no_studies_it_says_to_write_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert refusal("mine.py") == "no file mine.py; write one, or see studies/ for examples"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("[]", 'has no "study"'),
        ('{"jobs": []}', 'has no "study"'),
        ('{"study": {"kind": "Studdy"}}', "there is no record 'Studdy'; did you mean 'Study'"),
        ('{"study": {"kind": ["Study"]}}', "there is no record"),
        ('{"study": {"kind": "CLM"}}', "is no Study"),
        ('{"study": {"kind": "Study", "name": "s", "runs": []}}', "has no runs"),
    ],
)
def test_a_damaged_plan_is_refused(tmp_path, text, words):
    data = json.loads(text) if text != "{" else None
    path = written(tmp_path, json.dumps(with_checksum(data)) if isinstance(data, dict) else text, "plan.json")
    said = refusal(path)
    assert said.startswith(str(path))
    assert words in said
