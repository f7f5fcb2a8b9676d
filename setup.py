"""What an index shows is README.md without the links into the repository, which lead nowhere there."""

import re
from pathlib import Path

from setuptools import setup

PICTURE = re.compile(r"^!\[[^]]*\]\((?!https?:)[^)]*\)\n+", re.MULTILINE)
LINK = re.compile(r"\[([^]]+)\]\((?!https?:)[^)]*\)")

README = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")

setup(
    long_description=LINK.sub(r"\1", PICTURE.sub("", README)),
    long_description_content_type="text/markdown",
)
