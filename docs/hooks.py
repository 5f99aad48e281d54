"""What mkdocs does differently for these pages: `python3 run docs`.

README.md is the first page. A link to something that is not in the site, such as a folder or a source file, becomes its
path. Anchors are those of the repository's pages. The search works without a server, which mkdocs' own reads its index
from.
"""

import json
import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\[([^\]\n]*)\]\(([\w./-]+)\)")

# Answers the messages that mkdocs' search page sends to its worker.
WORKER = """
window.Worker = class {
  postMessage({ query }) {
    if (query !== undefined) return this.answer(query);
    document.addEventListener("DOMContentLoaded", () => {
      for (const data of [{ config: SEARCH.config }, { allowSearch: true }]) this.onmessage({ data });
    });
  }
  answer(query) {
    this.index ??= lunr(function () {
      this.ref("location"); this.field("title"); this.field("text");
      SEARCH.docs.forEach((page) => this.add(page));
    });
    const pages = Object.fromEntries(SEARCH.docs.map((page) => [page.location, page]));
    const results = this.index.search(query).map(({ ref }) => ({ ...pages[ref], summary: pages[ref].text.slice(0, 200) }));
    this.onmessage({ data: { results } });
  }
};
"""


def slug(heading, separator="-"):
    """Return the anchor of a heading as code hosts make it: `plan --gpus` is `plan---gpus`."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", separator)


def on_config(config):
    config.mdx_configs["toc"] = {"slugify": slug}


def on_files(files, config):
    text = re.sub(r"\]\((?!https?:|#)", "](../", (ROOT / "README.md").read_text(encoding="utf-8"))
    files.append(File.generated(config, "index.md", content=text.replace("](../docs/", "](")))


def on_page_markdown(markdown, page, config, files):
    folder = posixpath.dirname(page.file.src_uri)

    def path_of(link):
        text, target = link.groups()
        path = posixpath.normpath(posixpath.join("docs", folder, target))
        file = files.get_file_from_path(path.removeprefix("docs/")) if path.startswith("docs/") else None
        if (file and not file.inclusion.is_excluded()) or not (ROOT / path).exists():
            return link[0]
        return f"`{path}`" if text.strip("`") == path else f"{text} (`{path}`)"

    return LINK.sub(path_of, markdown)


def on_post_build(config):
    folder = Path(config.site_dir) / "search"
    index = json.loads((folder / "search_index.json").read_text(encoding="utf-8"))
    parts = [(folder / "lunr.js").read_text(), f"const SEARCH = {json.dumps(index)};", WORKER]
    (folder / "main.js").write_text("\n".join([*parts, (folder / "main.js").read_text()]), encoding="utf-8")
