"""Chat templates: how a conversation becomes a prompt; by name, as a Jinja text, or the one most of the models have."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from symfuse.errors import CheckpointError, OptionError
from symfuse.io import Checkpoint
from symfuse.messages import suggestion
from symfuse.rewriting.vocabulary.tokenizer import CONFIG, json_object

FILE = "chat_template.jinja"

TEMPLATES: Mapping[str, str] = {
    "chatml": (
        "{%- for message in messages -%}\n"
        "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}\n"
        "{%- endfor -%}\n"
        "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}\n"
    ),
    "alpaca": (
        "{%- set titles = {'user': '### Instruction:\\n', 'user_context': '### Input:\\n', "
        "'assistant': '### Response:\\n'} -%}\n"
        "{%- for message in messages -%}\n"
        "{{- titles.get(message.role, '') + message.content | trim -}}\n"
        "{%- if not loop.last or add_generation_prompt -%}{{- '\\n\\n' -}}{%- endif -%}\n"
        "{%- endfor -%}\n"
        "{%- if add_generation_prompt -%}{{- '### Response:\\n' -}}{%- endif -%}\n"
    ),
    "llama3": (
        "{{- bos_token -}}\n"
        "{%- for message in messages -%}\n"
        "{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim "
        "+ '<|eot_id|>' -}}\n"
        "{%- endfor -%}\n"
        "{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}\n"
    ),
    "mistral": (
        "{%- set system = messages[0].content + '\\n\\n' if messages[0].role == 'system' else '' -%}\n"
        "{%- set turns = messages[1:] if system else messages -%}\n"
        "{{- bos_token -}}\n"
        "{%- for message in turns -%}\n"
        "{%- if message.role != ('user' if loop.index0 % 2 == 0 else 'assistant') -%}\n"
        "{{- raise_exception('user and assistant must take turns, after a system message at most') -}}\n"
        "{%- endif -%}\n"
        "{%- if message.role == 'user' -%}\n"
        "{{- ' [INST] ' + (system if loop.first else '') + message.content + ' [/INST]' -}}\n"
        "{%- else -%}{{- ' ' + message.content + eos_token -}}{%- endif -%}\n"
        "{%- endfor -%}\n"
    ),
    "exaone": (
        "{%- if messages[0].role != 'system' -%}{{- '[|system|][|endofturn|]\\n' -}}{%- endif -%}\n"
        "{%- for message in messages -%}\n"
        "{{- '[|' + message.role + '|]' + message.content + ('\\n' if message.role == 'user' else '[|endofturn|]\\n') "
        "-}}\n"
        "{%- endfor -%}\n"
        "{%- if add_generation_prompt -%}{{- '[|assistant|]' -}}{%- endif -%}\n"
    ),
}


def chat_template(text: str, checkpoints: Sequence[Checkpoint] = ()) -> str | None:
    """The Jinja text that `chat_template:` of a recipe means: "auto" (the one that most models have, the first of
    several; None if none has one), a name of TEMPLATES, or a Jinja text. OptionError for anything else."""
    if text == "auto":
        templates = [template for model in checkpoints if (template := _of(model))]
        return Counter(templates).most_common(1)[0][0] if templates else None
    if text in TEMPLATES:
        return TEMPLATES[text]
    if "{{" in text or "{%" in text:
        return text
    raise OptionError(
        f"chat_template: {text!r} is neither auto, nor one of {', '.join(TEMPLATES)}, nor a Jinja template"
        f"{suggestion(text, ['auto', *TEMPLATES])}"
    )


def with_chat_template(
    files: Mapping[str, bytes], template: str, checkpoints: Sequence[Checkpoint] = ()
) -> dict[str, bytes]:
    """Tokenizer files with this chat template (as `chat_template` reads it) in place of their own, in a file of its
    own and, for readers that know no such file, in tokenizer_config.json if there is one. CheckpointError if that is
    damaged."""
    text = chat_template(template, checkpoints)
    if text is None:
        return dict(files)
    out = {**files, FILE: text.encode()}
    if CONFIG in files:
        settings = {**_settings(files[CONFIG], "the base model"), "chat_template": text}
        out[CONFIG] = (json.dumps(settings, indent=2, ensure_ascii=False) + "\n").encode()
    return out


def _of(model: Checkpoint) -> str | None:
    """A model's default chat template, from either place."""
    if model.folder is None:
        return None
    path, settings = model.folder / FILE, model.folder / CONFIG
    try:
        if path.is_file():
            return path.read_text("utf-8").strip()
        data = settings.read_bytes() if settings.is_file() else b"{}"
    except (OSError, ValueError) as error:
        raise CheckpointError(f"the chat template of {model.name} cannot be read: {error}. ({path})") from error
    template = _settings(data, model.name).get("chat_template")
    if isinstance(template, list):  # several, by name
        named = [entry for entry in template if isinstance(entry, Mapping) and entry.get("name") == "default"]
        template = named[-1].get("template") if named else None
    return template.strip() if isinstance(template, str) else None


def _settings(data: bytes, name: str) -> dict[str, Any]:
    """A tokenizer_config.json."""
    try:
        return json_object(CONFIG, data)
    except ValueError as error:
        raise CheckpointError(
            f"{error}, in {name}; it may hold the chat template. Copy or download it again, or merge without "
            "chat_template."
        ) from error
