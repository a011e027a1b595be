"""Writes docs/moved.md: what is moved of every declared family, what not, and why.

make moved
"""

from __future__ import annotations

from pathlib import Path

from symfuse.reports.families import families, markdown

PAGE = Path(__file__).parents[2] / "docs/moved.md"

if __name__ == "__main__":
    PAGE.write_text(markdown(families()), "utf-8")
