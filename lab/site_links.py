"""Hook of mkdocs for links that leave docs/: pictures come along, other files are named by their paths."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

_ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(\.\./([^)]+)\)")


def on_page_markdown(markdown: str, *, config: Any, files: Any, **others: Any) -> str:
    """The text of a page with links that work on the site."""

    def replace(link: re.Match[str]) -> str:
        is_shown, text, path = link.groups()
        if not path.endswith(".png"):
            return text if text.strip("`") == path else f"{text} (`{path}` in the repository)"
        name = f"pictures/{Path(path).name}"
        if files.get_file_from_path(name) is None:
            files.append(File.generated(config, name, abs_src_path=str(_ROOT / path)))
        return f"{is_shown}[{text}]({name})"

    return _LINK.sub(replace, markdown)
