"""paraphrase-MiniLM-L3 from ONNX computes what its graph computes, and is near for sentences that say the same."""

from __future__ import annotations

import paraphrase
import pytest
import torch

from symfuse.demo import packages

pytestmark = [pytest.mark.slow, pytest.mark.data]

SENTENCES = [
    "A man is eating food.", "A man is eating a piece of bread.",
    "The girl is carrying a baby.", "A young woman holds an infant.",
    "Stock prices fell sharply today.", "The market dropped steeply.",
]  # fmt: skip


def test_it_is_what_was_exported() -> None:
    reference = pytest.importorskip(
        "onnx.reference", reason="onnx is not installed; it comes with the extra `experiments`"
    )
    if reason := packages.available(packages.PARAPHRASE, packages.MINILM):
        pytest.skip(reason)
    import transformers

    folder = paraphrase.folder()
    model, about = transformers.BertModel.from_pretrained(folder, output_loading_info=True)
    assert not about["missing_keys"]
    assert not about["unexpected_keys"]
    batch = transformers.AutoTokenizer.from_pretrained(folder)(SENTENCES, padding=True, return_tensors="pt")
    with torch.inference_mode():
        hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None]
    embedded = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)

    (file,) = packages.fetch(packages.PARAPHRASE).glob("*/model/*.onnx")
    inputs = {name: batch[name].numpy() for name in ("input_ids", "attention_mask")}
    outputs = [torch.tensor(found) for found in reference.ReferenceEvaluator(str(file)).run(None, inputs)]
    (exported,) = (found for found in outputs if found.shape == hidden.shape)
    torch.testing.assert_close(hidden, exported, rtol=1e-4, atol=1e-5)

    near = embedded @ embedded.T - 2 * torch.eye(len(SENTENCES))
    assert near.argmax(-1).tolist() == [1, 0, 3, 2, 5, 4]
