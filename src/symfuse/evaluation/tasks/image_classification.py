"""The class of an image."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from symfuse.errors import CheckpointError
from symfuse.evaluation.data.reading import open_image
from symfuse.evaluation.tasks.base import (
    OPTIONS,
    UNKNOWN,
    UNLABELLED,
    Data,
    Predicting,
    checked,
    config_of,
    from_companions,
)
from symfuse.evaluation.tasks.labels import Labels
from symfuse.messages import first_line


class ImageClassification(Predicting):
    """Cross entropy and accuracy by image. All images are in memory, as the model takes them: see `limit`."""

    name = "image-classification"
    auto = "AutoModelForImageClassification"

    options = {"image_column": "image", "label_column": "label"} | OPTIONS | UNLABELLED

    @classmethod
    def prepare(cls, data: Data) -> ImageClassification:
        """Images go through the checkpoint's own image processor. Labels are names of the config's label2id, or
        integers. unlabelled: labels are not read."""
        data.require("image_column", labels="label_column")
        records, checkpoint = data.records, data.checkpoint
        config = config_of(checkpoint)
        labels = Labels(config, checkpoint.name)
        if "preprocessor_config.json" not in checkpoint.companions():
            raise CheckpointError(
                f"{checkpoint.name}: there is no image processor beside its weights; copy the preprocessor_config.json "
                "of the model it was trained from into its folder"
            )
        processor = from_companions(checkpoint, "AutoImageProcessor", "image processor")
        mode = "L" if getattr(config, "num_channels", 3) == 1 else "RGB"
        rows = data.rows
        numbers = [
            UNKNOWN if data.unlabelled else labels.number(records.value(i, data.label_column), records.where(i))
            for i in rows
        ]
        batches = []
        for start in range(0, len(rows), checked(data.batch_size)):
            some = slice(start, start + data.batch_size)
            images = [open_image(records.value(i, data.image_column), records.where(i), mode) for i in rows[some]]
            batches.append(
                {"pixel_values": _pixels(processor, images, checkpoint.name), "labels": torch.tensor(numbers[some])}
            )
        return cls(batches, records.source)


def _pixels(processor: Any, images: list[Any], name: str) -> Tensor:
    try:
        result: Tensor = processor(images, return_tensors="pt")["pixel_values"]
    except Exception as error:  # whatever the processors' classes raise
        raise CheckpointError(
            f"{name}: its image processor cannot make a batch of the images ({first_line(error)})"
        ) from error
    return result
