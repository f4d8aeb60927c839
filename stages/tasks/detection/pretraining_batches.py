"""What the tiny model is pre-trained on: scenes, conversations about them, and where in them to look.

Everything is a pure function of a seed and an index; nothing is stored.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen2VLProcessor

from stages.kit.data.conversation import Conversation
from stages.kit.training.collators import IGNORED, ConversationCollator
from stages.tasks.detection.boxes import encode_boxes
from stages.tasks.detection.pointing import (
    CELL_PARTS,
    MAX_SIDE,
    PATCH_PARTS,
    Looks,
    PointingTargets,
    grid_targets,
    merge_order,
)
from stages.tasks.detection.records import TARGET
from stages.tasks.detection.scenes import OBJECTS, Scene, draw_scene

NAMES = (
    TARGET,
    "price-tag",
    "ingredients-list",
    "nutri-score",
    "best-before-date",
    "recycling-mark",
    "brand-name",
    "photo",
)
"""Names of things that no scene shows. Where a scene holds one kind of object, it is sometimes asked for by
such a name: so the model learns to answer with the name it was asked for, whatever it is."""


@dataclass(frozen=True)
class Example:
    scene: Scene
    conversation: Conversation
    answered: tuple[int, ...]
    """Indices of the scene's objects in the order in which the conversation answers with them."""


def question(name: str) -> str:
    return f"Detect the bounding box of the {name.replace('-', ' ')}."


def corpus() -> Iterator[str]:
    """Texts from which the tokenizer learns its pieces: questions and answers, without the special tokens."""
    rng = random.Random(0)
    for _ in range(60):
        for name in OBJECTS + NAMES:
            x0, y0, x1, y1 = (rng.randrange(1000) for _ in range(4))
            yield f"system\nYou are a helpful assistant.\nuser\n{question(name)}\nassistant\n"
            yield name
            yield f"({x0},{y0}),({x1},{y1})"


def make_example(seed: int, index: int, objects: int) -> Example:
    """Example `index` of the endless series: a scene and questions for all that it shows, in random order.

    objects: how many categories the scene shows, 1 to 3.
    """
    scene = draw_scene("objects", seed, index, objects=objects)
    rng = random.Random(f"questions/{seed}/{index}")
    messages: list[dict[str, Any]] = []
    answered: list[int] = []
    for category in rng.sample(sorted(set(scene.categories)), objects):
        found = [i for i, other in enumerate(scene.categories) if other == category]
        name = rng.choice(NAMES) if objects == 1 and rng.random() < 0.3 else category
        content = [{"type": "text", "text": question(name)}]
        if not messages:
            content.insert(0, {"type": "image"})
        answer = encode_boxes([scene.boxes[i] for i in found], label=name)
        messages.append({"role": "user", "content": content})
        messages.append({"role": "assistant", "content": [{"type": "text", "text": answer}]})
        answered += found
    conversation = Conversation(sample_id=f"{seed}/{index}", messages=messages, images=[scene.image])
    return Example(scene, conversation, tuple(answered))


def make_batch(
    processor: Qwen2VLProcessor, *, seed: int, step: int, batch_size: int
) -> tuple[dict[str, Tensor], PointingTargets]:
    """The model's inputs with labels, and the auxiliary targets. All scenes of a step show equally many kinds."""
    first, objects = step * batch_size, 1 + step % 3
    examples = [make_example(seed, first + i, objects) for i in range(batch_size)]
    collate = ConversationCollator(
        processor, lambda i: examples[i].conversation, loss="assistant-only", max_length=1024
    )
    inputs = collate([{"sample": i} for i in range(len(examples))])
    grids = [(rows, columns) for _, rows, columns in inputs["image_grid_thw"].tolist()]
    return inputs, pointing_targets(processor, examples, inputs, grids)


def pointing_targets(
    processor: Qwen2VLProcessor,
    examples: list[Example],
    inputs: dict[str, Tensor],
    grids: list[tuple[int, int]],
) -> PointingTargets:
    """grids: rows and columns of patches of each picture, twice those of its cells."""
    tokenizer = processor.tokenizer
    image_token = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    patches, cells, positions, looks = [], [], [], []
    for row, (example, (rows, columns)) in enumerate(zip(examples, grids, strict=True)):
        scene = example.scene
        kinds = [OBJECTS.index(category) for category in scene.categories]
        order = merge_order(rows, columns)
        fine = grid_targets(scene.boxes, kinds, rows, columns, PATCH_PARTS)
        coarse = grid_targets(scene.boxes, kinds, rows // 2, columns // 2, CELL_PARTS)
        assert max(rows, columns) <= 2 * MAX_SIDE, (rows, columns)
        patches.append((fine.category[order], fine.edge_part[order]))
        cells.append((coarse.category, coarse.edge_part, coarse.digits))
        positions.append(torch.cartesian_prod(torch.arange(rows // 2), torch.arange(columns // 2)))

        ids, labels = inputs["input_ids"][row].tolist(), inputs["labels"][row].tolist()
        first_cell = ids.index(image_token)
        for query, answer_box, edge in coordinate_digits(tokenizer, ids, labels):
            on_edge = coarse.on_edge[example.answered[answer_box], edge]
            allowed = torch.zeros(len(ids), dtype=torch.bool)
            allowed[first_cell : first_cell + len(on_edge)] = on_edge
            looks.append((row, query, allowed))
    rows_of, queries, allowed_cells = zip(*looks, strict=True)
    return PointingTargets(
        *(torch.cat(parts) for parts in zip(*patches, strict=True)),
        *(torch.cat(parts) for parts in zip(*cells, strict=True)),
        torch.cat(positions),
        Looks(torch.tensor(rows_of), torch.tensor(queries), torch.stack(allowed_cells)),
    )


def coordinate_digits(tokenizer: Any, ids: list[int], labels: list[int]) -> Iterator[tuple[int, int, int]]:
    """Finds the first two digits of every coordinate in a row's answers; a cell cannot show the third.

    Yields (position from which the digit is predicted, which box of the row, which edge of it).
    """
    digits = {tokenizer.convert_tokens_to_ids(str(digit)) for digit in range(10)}
    box_start = tokenizer.convert_tokens_to_ids("<|box_start|>")
    box, edge, place = -1, -1, 0
    for position, token in enumerate(ids):
        if labels[position] == IGNORED:
            continue
        if token == box_start:
            box, edge = box + 1, -1
        elif token in digits:
            if ids[position - 1] not in digits:  # after an opening bracket or a comma: the next coordinate
                edge, place = edge + 1, 0
            place += 1
            if place <= 2:
                yield position - 1, box, edge
