"""The long description for package indexes; everything else is said in pyproject.toml."""

import re
from pathlib import Path

from setuptools import setup


def described(readme: str) -> str:
    """The README for a page that has neither the files beside it nor names for its headings: such links become words."""

    def words(link: re.Match[str]) -> str:
        text, target = link["text"], link["target"]
        if link["picture"]:
            return f"*{text}: {target}*"
        return text if target.startswith("#") or target == text else f"{text} ({target})"

    return re.sub(r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?P<target>(?!https?://)[^)\s]+)\)", words, readme)


if __name__ == "__main__":
    readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    setup(long_description=described(readme), long_description_content_type="text/markdown")
