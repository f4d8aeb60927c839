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
from stages.tasks.detection.samples.boxes import encode_boxes
from stages.tasks.detection.samples.records import TARGET
from stages.tasks.detection.sources.scenes import OBJECTS, Scene, draw_scene
from tools.tiny_bases.detection.pointing import (
    CELL_PARTS,
    MAX_SIDE,
    PATCH_PARTS,
    Looks,
    PointingTargets,
    grid_targets,
    merge_order,
)

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
    """The model's inputs with labels, and the auxiliary targets.

    All scenes of a step show equally many kinds of object, so that its rows are of about one length.
    """
    first, objects = step * batch_size, 1 + step % 3
    examples = [make_example(seed, first + i, objects) for i in range(batch_size)]
    collate = ConversationCollator(
        processor, examples, lambda example: example.conversation, loss="assistant-only", max_length=1024
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
    patches, cells, positions = [], [], []
    for example, (rows, columns) in zip(examples, grids, strict=True):
        assert max(rows, columns) <= 2 * MAX_SIDE, (rows, columns)
        kinds = [OBJECTS.index(category) for category in example.scene.categories]
        order = merge_order(rows, columns)
        fine = grid_targets(example.scene.boxes, kinds, rows, columns, PATCH_PARTS)
        patches.append((fine.category[order], fine.edge_part[order]))
        cells.append(grid_targets(example.scene.boxes, kinds, rows // 2, columns // 2, CELL_PARTS))
        positions.append(torch.cartesian_prod(torch.arange(rows // 2), torch.arange(columns // 2)))
    return PointingTargets(
        patch_category=torch.cat([category for category, _ in patches]),
        patch_edge_part=torch.cat([edge_part for _, edge_part in patches]),
        cell_category=torch.cat([grid.category for grid in cells]),
        cell_edge_part=torch.cat([grid.edge_part for grid in cells]),
        cell_digits=torch.cat([grid.digits for grid in cells]),
        cell_position=torch.cat(positions),
        looks=find_looks(processor.tokenizer, examples, inputs, [grid.on_edge for grid in cells]),
    )


def find_looks(tokenizer: Any, examples: list[Example], inputs: dict[str, Tensor], on_edges: list[Tensor]) -> Looks:
    """on_edges: of each picture (objects, 4, cells), whether a cell lies on that edge of that object."""
    image_token = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    rows, queries, allowed = [], [], []
    for row, (example, on_edge) in enumerate(zip(examples, on_edges, strict=True)):
        ids, labels = inputs["input_ids"][row].tolist(), inputs["labels"][row].tolist()
        first_cell, num_cells = ids.index(image_token), on_edge.shape[2]
        for query, box, edge in coordinate_digits(tokenizer, ids, labels):
            is_target = torch.zeros(len(ids), dtype=torch.bool)
            is_target[first_cell : first_cell + num_cells] = on_edge[example.answered[box], edge]
            rows.append(row)
            queries.append(query)
            allowed.append(is_target)
    return Looks(torch.tensor(rows), torch.tensor(queries), torch.stack(allowed))


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
