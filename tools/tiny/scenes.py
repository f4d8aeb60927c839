"""Examples for the tiny vision-language model: scenes, conversations about them, and where in them to look.

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
from tools.tiny.pointing import CELL_PARTS, MAX_SIDE, PATCH_PARTS, GridTargets, PointingTargets, grid_targets

NAMES = (
    *(TARGET, "price-tag", "ingredients-list", "nutri-score"),
    *("best-before-date", "recycling-mark", "brand-name", "photo"),
)
"""Names of things that no scene shows. A scene with one kind of object is sometimes asked for by such a name: so the
model learns to answer with the name it was asked for, whatever it is."""


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
    """Example `index` of an endless series: a scene of 1 to 3 categories, and a question for each, in random order."""
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
    examples = [make_example(seed, step * batch_size + row, objects=1 + step % 3) for row in range(batch_size)]
    collate = ConversationCollator(
        processor, examples, lambda example: example.conversation, loss="assistant-only", max_length=1024
    )
    inputs = collate([{"sample": row} for row in range(batch_size)])
    return inputs, pointing_targets(processor.tokenizer, examples, inputs)


def pointing_targets(tokenizer: Any, examples: list[Example], inputs: dict[str, Tensor]) -> PointingTargets:
    image_token = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    patches, cells, positions, looks = [], [], [], []
    for row, (example, (_, high, wide)) in enumerate(zip(examples, inputs["image_grid_thw"].tolist(), strict=True)):
        assert max(high, wide) <= 2 * MAX_SIDE, (high, wide)
        kinds = [OBJECTS.index(category) for category in example.scene.categories]
        order = merge_order(high, wide)
        fine, _ = grid_targets(example.scene.boxes, kinds, high, wide, PATCH_PARTS)
        patches.append((fine.category[order], fine.edge_part[order], fine.digits[order]))
        coarse, on_edge = grid_targets(example.scene.boxes, kinds, high // 2, wide // 2, CELL_PARTS)
        cells.append((coarse.category, coarse.edge_part, coarse.digits))
        positions.append(torch.cartesian_prod(torch.arange(high // 2), torch.arange(wide // 2)))
        ids, labels = inputs["input_ids"][row].tolist(), inputs["labels"][row].tolist()
        first_cell, num_cells = ids.index(image_token), on_edge.shape[2]
        for query, box, edge in coordinate_digits(tokenizer, ids, labels):
            allowed = torch.zeros(len(ids), dtype=torch.bool)
            allowed[first_cell : first_cell + num_cells] = on_edge[example.answered[box], edge]
            looks.append((row, query, allowed))
    rows, queries, all_allowed = zip(*looks, strict=True)
    return PointingTargets(
        patches=GridTargets(*map(torch.cat, zip(*patches, strict=True))),
        cells=GridTargets(*map(torch.cat, zip(*cells, strict=True))),
        cell_position=torch.cat(positions),
        look_row=torch.tensor(rows),
        look_query=torch.tensor(queries),
        look_allowed=torch.stack(all_allowed),
    )


def merge_order(rows: int, columns: int) -> Tensor:
    """(rows * columns,) the order in which Qwen2-VL stores patches: four of a cell, then four of the next."""
    return torch.arange(rows * columns).view(rows // 2, 2, columns // 2, 2).permute(0, 2, 1, 3).reshape(-1)


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
