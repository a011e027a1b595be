"""A tokenizer as data: the id of each string, read from its files without running any code of the model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from symfuse.errors import CheckpointError, IncompatibleError
from symfuse.io import Checkpoint
from symfuse.io.companions import read_companions
from symfuse.io.remote import Place, Remote
from symfuse.messages import first_line, some

# The defaults of an added token, as `add_tokens` of the tokenizers library makes it from a string.
PLAIN: Mapping[str, Any] = {
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": True,
    "special": False,
}
TOKENIZER, CONFIG, ADDED = "tokenizer.json", "tokenizer_config.json", "added_tokens.json"
SPECIAL_MAP = "special_tokens_map.json"
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
VOCABULARIES = ("vocab.txt", "vocab.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "spm.model")


@dataclass(frozen=True)
class Tokenizer:
    """name: of the model. tokens: string -> id, by ascending id. added: those matched in the text before it is split,
    with their attributes. files: by name; with generation_config.json, whose ids are this tokenizer's. pieces: how
    many entries the model of the tokenizer has, without added tokens."""

    name: str
    tokens: Mapping[str, int]
    added: Mapping[str, Mapping[str, Any]]
    files: Mapping[str, bytes]
    pieces: int

    def extended(self, new: Mapping[str, Mapping[str, Any]]) -> Tokenizer:
        """With further added tokens (string -> attributes), which get the next ids, in order.

        IncompatibleError if the next id is taken: the tokenizers library would assign it a second time.
        """
        if not new:
            return self
        ids = _Ids(dict(self.tokens), self.pieces)
        ids.last_added = max((self.tokens[token] for token in self.added), default=-1)
        taken = set(self.tokens.values())
        for token, attributes in new.items():
            if (number := ids.add(token, attributes)) in taken:
                raise IncompatibleError(
                    f"the tokenizer of {self.name} has unused ids below its largest, and id {number}, the next that "
                    f"the tokenizers library would give to {token!r}, is taken; no token can be added to it. "
                    "Choose the tokenizer of another model."
                )
            taken.add(number)
        entries = {ids.tokens[token]: {"content": token, **attributes} for token, attributes in new.items()}
        return Tokenizer(self.name, ids.tokens, {**self.added, **new}, _with_added(self.files, entries), self.pieces)


class _Ids:
    """Assign ids to added tokens as the tokenizers library does when it reads a file: a known string keeps its id,
    others follow the pieces and the largest added id; the ids that the file declares are ignored."""

    def __init__(self, tokens: dict[str, int], pieces: int) -> None:
        self.tokens = tokens
        self.pieces = pieces
        self.added: dict[str, Mapping[str, Any]] = {}
        self.last_added = -1

    def add(self, token: str, attributes: Mapping[str, Any]) -> int:
        number = self.tokens.setdefault(token, max(self.pieces, self.last_added + 1))
        self.last_added = max(self.last_added, number)
        self.added[token] = {key: bool(attributes.get(key, default)) for key, default in PLAIN.items()}
        return number


def has_tokenizer(checkpoint: Checkpoint) -> bool:
    """Whether the model's folder holds files of a tokenizer that can be read."""
    folder = checkpoint.folder
    return folder is not None and any((folder / name).is_file() for name in (TOKENIZER, *VOCABULARIES))


def read_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer of a model, as `AutoTokenizer` would load it.

    From tokenizer.json (https://huggingface.co/docs/tokenizers), else vocab.txt (WordPiece) or vocab.json (BPE), else,
    for sentencepiece models, through transformers; then the added and special tokens of the other files.
    CheckpointError, naming the file, if there is none or it is damaged.
    """
    folder = checkpoint.folder
    if folder is None or not has_tokenizer(checkpoint):
        raise CheckpointError(
            f"{checkpoint.name} has no tokenizer files (tokenizer.json, vocab.txt, vocab.json or a sentencepiece "
            "model). Copy those of the model it was trained from into its folder, or merge without a tokenizer source."
        )
    try:
        return _parse(checkpoint, folder, _files(folder))
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"the tokenizer files of {checkpoint.name} cannot be read ({type(error).__name__}: {error}); copy or "
            f"download them again. ({folder})"
        ) from error


def rows(checkpoint: Checkpoint) -> int:
    """The number of rows of the embedding by the config, padding included. CheckpointError if no tensor has that
    number."""
    count = int(size_holder(checkpoint.name, checkpoint.config)["vocab_size"])
    if not any(count in checkpoint.info(name).shape for name in checkpoint):
        raise CheckpointError(
            f"{checkpoint.name}: config.json says vocab_size {count}, and no tensor has as many rows; does config.json "
            "belong to these weights?"
        )
    return count


def size_holder(name: str, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config, or its text part, that contains vocab_size; CheckpointError if none does."""
    for part in (config, config.get("text_config")):
        if isinstance(part, Mapping) and type(part.get("vocab_size")) is int:
            return part
    raise CheckpointError(f"the config of {name} has no vocab_size, which a merge of vocabularies needs")


def without_rows(tokenizer: Tokenizer, count: int) -> str | None:
    """What is wrong if a token has no row, in words; fewer tokens than rows are normal (padding)."""
    without = [f"{token!r} ({number})" for token, number in tokenizer.tokens.items() if number >= count]
    if not without:
        return None
    return (
        f"the tokenizer of {tokenizer.name} has {len(tokenizer.tokens)} tokens with ids up to "
        f"{max(tokenizer.tokens.values())}, but its embedding has {count} rows (vocab_size): no row for "
        f"{some(without)}. Restore the files that belong to these weights, or resize the model first "
        "(resize_token_embeddings of transformers)."
    )


def require_rows(tokenizer: Tokenizer, count: int) -> None:
    """CheckpointError if a token has no row."""
    if fault := without_rows(tokenizer, count):
        raise CheckpointError(fault)


def _files(folder: Place) -> dict[str, bytes]:
    """The files of a tokenizer, and the generation config; unchanged except for references to code, which are
    removed."""
    others = ("LICEN", "preprocessor", "processor", "video_", "image_", "modules", "sentence_", "config_sentence_")
    files = read_companions(folder)
    return {name: data for name, data in files.items() if "/" not in name and not name.startswith(others)}


def _parse(checkpoint: Checkpoint, folder: Place, files: Mapping[str, bytes]) -> Tokenizer:
    library = _json(files, TOKENIZER)
    pieces, count = _pieces(checkpoint, folder, files, library)
    ids = _Ids(pieces, count)
    for token, attributes in _added(files, library):
        if token:
            ids.add(token, attributes if token not in ids.added else {**ids.added[token], **attributes})
    tokens = ids.tokens
    if any(a > b for a, b in pairwise(tokens.values())):
        tokens = dict(sorted(tokens.items(), key=lambda item: item[1]))
    return Tokenizer(checkpoint.name, tokens, ids.added, files, count)


def _pieces(
    checkpoint: Checkpoint, folder: Place, files: Mapping[str, bytes], library: Mapping[str, Any]
) -> tuple[dict[str, int], int]:
    """The entries of the tokenizer's model, and how many there are (a Unigram may list a piece twice)."""
    if TOKENIZER in files:
        vocab = library["model"]["vocab"]
        if isinstance(vocab, list):  # Unigram: [piece, score]
            return {piece: number for number, (piece, _) in enumerate(vocab)}, len(vocab)
    elif "vocab.json" in files:
        vocab = _json(files, "vocab.json")
    elif "vocab.txt" in files:
        text = files["vocab.txt"].decode()
        vocab = {line.rstrip("\r"): number for number, line in enumerate(text.removesuffix("\n").split("\n"))}
    else:
        vocab = _through_transformers(checkpoint, folder)
    if not isinstance(vocab, dict) or not all(type(number) is int and number >= 0 for number in vocab.values()):
        raise ValueError("the vocabulary is not a mapping from strings to ids")
    return vocab, len(vocab)


def _through_transformers(checkpoint: Checkpoint, folder: Place) -> dict[str, int]:
    """A sentencepiece model is a binary file, which transformers reads (with the sentencepiece package)."""
    if isinstance(folder, Remote):
        raise CheckpointError(
            f"{checkpoint.name} has a tokenizer without tokenizer.json, which transformers reads from local folders "
            f"only; download the folder. ({folder})"
        )
    try:
        from transformers import AutoTokenizer

        loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise CheckpointError(
            f"{checkpoint.name} has a tokenizer without tokenizer.json, which transformers could not read "
            f"({first_line(error)}). Convert it: AutoTokenizer.from_pretrained(folder).save_pretrained(folder), with "
            f"transformers and sentencepiece installed. ({folder})"
        ) from error
    return dict(loaded.get_vocab())


def _added(files: Mapping[str, bytes], library: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Added and special tokens of all files, in the order in which transformers adds them."""
    settings, special = _json(files, CONFIG), {}
    for entry in library.get("added_tokens") or []:
        yield entry["content"], entry
    if "added_tokens_decoder" in settings:
        for _, entry in sorted(settings["added_tokens_decoder"].items(), key=lambda item: int(item[0])):
            yield entry["content"], entry
    else:
        special = _json(files, SPECIAL_MAP)
        for token, _ in sorted(_json(files, ADDED).items(), key=lambda item: int(item[1])):
            yield token, {}
    for token in _specials({**settings, **special}):
        yield token, {"normalized": False, "special": True}


def _specials(settings: Mapping[str, Any]) -> Iterator[str]:
    """The special tokens that a tokenizer's settings name: strings, or {content: …}; by key, or several in a list."""
    order = [f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
    values = [settings[key] for key in order if key in settings]
    values += [value for key, value in settings.items() if key.endswith("_token") and key not in order]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        value = settings.get(key) or []
        values += value.values() if isinstance(value, Mapping) else value
    for value in values:
        content = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(content, str):
            yield content


def _with_added(files: Mapping[str, bytes], entries: Mapping[int, Mapping[str, Any]]) -> dict[str, bytes]:
    """The files with further added tokens, wherever these files list them."""
    out = dict(files)
    if TOKENIZER in out:
        data = _json(out, TOKENIZER)
        more = [{"id": number, **entry} for number, entry in entries.items()]
        out[TOKENIZER] = _dump({**data, "added_tokens": [*(data.get("added_tokens") or []), *more]})
    settings = _json(out, CONFIG)
    if "added_tokens_decoder" in settings:
        more_by_id = {str(number): entry for number, entry in entries.items()}
        out[CONFIG] = _dump({**settings, "added_tokens_decoder": {**settings["added_tokens_decoder"], **more_by_id}})
    elif ADDED in out or TOKENIZER not in out:
        more_ids = {entry["content"]: number for number, entry in entries.items()}
        out[ADDED] = _dump({**_json(out, ADDED), **more_ids})
    return out


def _json(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """A file's JSON object; empty if there is no such file."""
    return json_object(name, files[name]) if name in files else {}


def json_object(name: str, data: bytes) -> dict[str, Any]:
    """The JSON object in a file; ValueError, naming the file, if there is none, or one that cannot be written again."""
    try:
        value = json.loads(data)
        if SURROGATE.search(data):  # pairs are characters; half a pair is none, and tokenizers refuses the file
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{name} is not a JSON object")
    return value


def _dump(data: Mapping[str, Any]) -> bytes:
    return (json.dumps(data, indent=2, ensure_ascii=False) + "\n").encode()
