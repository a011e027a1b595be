"""Models whose vocabularies differ: one output vocabulary, and every model rewritten into it, lazily, row by row."""

from __future__ import annotations

from symfuse.rewriting.vocabulary.build import Report, TokenSource, Vocabulary, build, shared_rows
from symfuse.rewriting.vocabulary.chat import TEMPLATES, chat_template, with_chat_template
from symfuse.rewriting.vocabulary.compare import Difference, compare, compare_tokenizers, require_one_size
from symfuse.rewriting.vocabulary.rows import rewrite
from symfuse.rewriting.vocabulary.tokenizer import Tokenizer, has_tokenizer, read_tokenizer

__all__ = [
    "TEMPLATES", "Difference", "Report", "TokenSource", "Tokenizer", "Vocabulary", "build", "chat_template", "compare",
    "compare_tokenizers", "has_tokenizer", "read_tokenizer", "require_one_size", "rewrite", "shared_rows",
    "with_chat_template",
]  # fmt: skip
