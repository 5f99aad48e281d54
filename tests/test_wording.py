"""Words that the project gave up for the field's own (docs/glossary.md has those it uses) do not return."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
# A word of an identifier counts too: its parts are separated by underscores.
OLD = {
    r"parcels?": "archive",
    r"receipts?": "metadata only",
    r"leaf": "trial",
    r"manners?": "runtime options",
    r"sights?": "attention pattern",
    r"unsound": "nonfinite",
    r"aback": "transposed copy",
    r"attendance": "worker registry",
}
OLDER_STORES = {"store.py", "exactness.md"}  # these name the folders of older versions


def test_no_old_word_stands_in_code_or_documentation():
    found = []
    for pattern in ("src/**/*.py", "studies/*.py", "docs/*.md", "README.md"):
        for path in ROOT.glob(pattern):
            text = path.read_text(encoding="utf-8") if path.name not in OLDER_STORES else ""
            for old, new in OLD.items():
                for match in re.finditer(rf"(?<![a-z])(?:{old})(?![a-z])", text, re.IGNORECASE):
                    line = text.count("\n", 0, match.start()) + 1
                    found.append(f"{path.relative_to(ROOT)}:{line}: {match[0]}; write {new}")
    assert not found, "\n".join(found)
