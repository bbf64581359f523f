"""Bring the files that pages link to outside docs/ into the site, so links work here as on GitHub.

The root of the site is docs/, and README.md is its first page.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
PATTERNS = ["*.md", "tests/README.md", "examples/*", "notebooks/*", "results/**/*"]
LINK = re.compile(r"\[([^\[\]]*(?:\[[^\]]*\]\([^)]*\))?)\]\((?!\w+:|#)([^)#\s]+)(#[^)]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the files outside docs/."""
    for path in (path for pattern in PATTERNS for path in ROOT.glob(pattern) if path.is_file()):
        name = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turn links into those of the site; a link to any other file becomes its text."""
    source, folder = Path(page.file.abs_src_path), posixpath.dirname(page.file.src_uri)

    def link(match: re.Match[str]) -> str:
        text, target, anchor = match.groups()
        path = (source.parent / target).resolve()
        if not path.exists():
            return match[0]  # a warning, which ends the build
        name = path.relative_to(ROOT).as_posix().removeprefix("docs/")
        in_site = files.get_file_from_path(name) is not None
        return f"[{text}]({posixpath.relpath(name, folder)}{anchor or ''})" if in_site else text

    # GitHub wants a bar of code in a table escaped, this parser does not
    return LINK.sub(link, markdown).replace("\\|", "|")
