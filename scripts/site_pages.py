# SPDX-License-Identifier: Apache-2.0
"""A hook of MkDocs: pages and files outside `docs/` that pages link to become part of the site.

Links stay as they are in the repository. On the site, `README.md` and its neighbours are pages under `project/`. Every other
linked file is copied below `files/`, and a linked folder is a page that lists its files.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PROJECT_PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")


def github_slug(title: str, separator: str) -> str:
    """Return the anchor of a heading as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", separator)


def place(path: str) -> str:
    """Return where a path of the repository lies on the site, as a source of MkDocs."""
    if path in PROJECT_PAGES:
        return f"project/{path.lower()}"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if (ROOT / path).is_dir():
        return f"files/{path}/index.md"
    # a Markdown file is a page; README.md would take the place of the list of its folder
    return f"files/{path}".replace("README.md", "readme.md")


def target(page: str, link: str) -> str | None:
    """Return the path in the repository that a link of a page (also a path there) leads to: none if it leads elsewhere."""
    name = link.partition("#")[0]
    if not name or re.match(r"[a-z]+:", link):
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), name))
    return path if (ROOT / path).exists() else None


def moved(page: str, text: str) -> str:
    """Return a page's text with links to where their targets lie on the site."""
    start = posixpath.dirname(place(page))

    def link(match: re.Match[str]) -> str:
        path = target(page, match[1])
        if path is None:
            return match[1]
        anchor = match[1].partition("#")[1:]
        return posixpath.relpath(place(path), start or ".") + "".join(anchor)

    parts, end = [], 0
    for fence in FENCE.finditer(text):
        parts += [LINK.sub(link, text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, LINK.sub(link, text[end:])])


def linked() -> dict[str, str]:
    """Return every path outside `docs/` that pages link to, directly or through such a page, with its place."""
    known: dict[str, str] = {}
    waiting = [*(f"docs/{path.name}" for path in DOCS.glob("*.md")), *PROJECT_PAGES]
    known.update((path, place(path)) for path in PROJECT_PAGES)
    while waiting:
        page = waiting.pop()
        for link in LINK.findall(FENCE.sub("", (ROOT / page).read_text(encoding="utf-8"))):
            path = target(page, link)
            if path is not None and not path.startswith("docs/") and path not in known:
                known[path] = place(path)
                if path.endswith(".md"):
                    waiting.append(path)
    return known


def listing(folder: str) -> str:
    """Return a page that names the files of a folder."""
    names = sorted(path.name for path in (ROOT / folder).iterdir() if not path.name.startswith((".", "_")))
    return f"# {folder}\n\n" + "".join(f"- `{name}`\n" for name in names)


def on_files(files: Any, config: Any) -> Any:
    """Add them to the site: MkDocs calls this with the files of `docs/`."""
    from mkdocs.structure.files import File

    for path, source in linked().items():
        if (ROOT / path).is_dir():
            files.append(File.generated(config, source, content=listing(path)))
        elif path.endswith(".md"):
            text = moved(path, (ROOT / path).read_text(encoding="utf-8"))
            files.append(File.generated(config, source, content=text))
        else:
            files.append(File.generated(config, source, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Move the links of a page of `docs/`; the others are moved already."""
    return markdown if page.file.generated_by else moved(f"docs/{page.file.src_uri}", markdown)
