"""A hook of MkDocs: the site shows what the documentation links to beside ``docs/``.

Pages link to pictures, examples and the README as they lie in the repository, so that the links
work there. The site gets these files in folders of its own, and links are turned to them. Where the
environment variable ``DOCS_EXPLORER`` asks for it, the site has the schedule explorer too.
"""

import os
import re
import sys
from pathlib import Path
from typing import Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

BESIDE: Final = ("images/*.*", "examples/*.*", "Dockerfile")
"""Files of the repository outside ``docs/`` that the site has too."""

_LINK: Final = re.compile(r"\]\((?P<up>(?:\.\./)+)(?P<rest>[^)\s]+)\)")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the files of ``BESIDE`` to the files of the site."""
    root = Path(config.docs_dir).parent
    for path in sorted(path for pattern in BESIDE for path in root.glob(pattern)):
        name = path.relative_to(root).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links that leave ``docs/`` to the copies of the files within the site."""
    depth = page.file.src_uri.count("/")

    def turned(link: re.Match[str]) -> str:
        levels = link["up"].count("../")
        rest = link["rest"]
        if levels != depth + 1:
            return link[0]
        if rest == "README.md" or rest.startswith("README.md#"):
            rest = "index.md"
        return f"]({'../' * depth}{rest})"

    return _LINK.sub(turned, markdown)


def on_post_build(*, config: MkDocsConfig) -> None:
    """Add the schedule explorer as ``explore/``, if ``DOCS_EXPLORER`` is set.

    ``DOCS_EXPLORER`` is 1 (npm fetches Pyodide), or a folder with Pyodide's unpacked package.
    """
    asked = os.environ.get("DOCS_EXPLORER")
    if not asked:
        return
    sys.path.insert(0, str(Path(config.docs_dir).parent))
    from megatron.commands.exploring.export import (
        export,
    )  # a site without the explorer needs fewer files

    export(Path(config.site_dir) / "explore", None if asked == "1" else Path(asked))
