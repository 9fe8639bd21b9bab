"""The page as one file that needs no network: its styles, its scripts and its values within.

Scripts are modules that import each other. In one file they stand behind one another in the order
of their imports, without the lines that import, so no two of them may define one name.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from megatron.commands.watching.server import page_file

ENTRY: Final = "main.js"

_IMPORT: Final = re.compile(r'^import \{[^}]*\} from "\./([a-z_]+\.js)";\n', re.MULTILINE)
_EXPORT: Final = re.compile(r"^export ", re.MULTILINE)
_STYLE: Final = re.compile(r'<link rel="stylesheet" href="([a-z]+\.css)">')
_SCRIPT: Final = f'<script type="module" src="{ENTRY}"></script>'
_ICON: Final = re.compile(r'<link rel="icon"[^>]*>\n')
_HEAD: Final = '<meta charset="utf-8">'

_POLICY: Final = (
    '<meta http-equiv="Content-Security-Policy" '
    "content=\"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'\">"
)
"""Tells the browser to load nothing, whatever the values hold."""


def static_page(values: Mapping[str, Any]) -> str:
    """Return the page with its values in it.

    Args:
        values: of ``Watched.data``.
    """
    text = page_file("index.html").read_text(encoding="utf-8")
    assert _SCRIPT in text, "the page has one script"
    assert _HEAD in text, "the page has a head"
    text = _ICON.sub("", text).replace(_HEAD, f"{_HEAD}\n{_POLICY}")
    text = _STYLE.sub(lambda link: f"<style>\n{_text(link[1])}</style>", text)
    script = f'<script type="module">\n{_script(ENTRY, set())}</script>'
    data = f'<script type="application/json" id="values">{embedded(values)}</script>'
    return text.replace(_SCRIPT, f"{data}\n{script}")


def embedded(values: Mapping[str, Any]) -> str:
    """Return values as JSON that cannot end the element of HTML that holds them."""
    text = json.dumps(values, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _text(name: str) -> str:
    return page_file(name).read_text(encoding="utf-8")


def _script(name: str, done: set[str]) -> str:
    """Return a script behind the scripts that it imports, each once."""
    done.add(name)
    text = _text(name)
    before = [_script(own, done) for own in _IMPORT.findall(text) if own not in done]
    return "".join([*before, _EXPORT.sub("", _IMPORT.sub("", text))])
