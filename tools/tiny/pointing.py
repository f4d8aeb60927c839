"""Examples and losses that teach a vision-language model to point. For pre-training only: no loss stays in the model.

Examples are scenes and conversations about them, pure functions of a seed and an index.

Predicting the answer's text alone barely teaches a small model where things are. Three kinds of loss help:
- in the vision tower, on every patch after a middle block and on every cell after the projector: which object is here,
  does an edge of it fall here, and where in the cell?
- in the first layers of the language model, on the cells: row and column, then the digits of the edge's coordinate;
- on attention: where a coordinate is about to be written, two heads look at the cells on that edge.

A patch is 14 x 14 pixels; a cell is 2 x 2 patches, one visual token of the language model. An edge is one of x0, y0,
x1, y1, in that order wherever four of a kind are stored.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import Qwen2VLForConditionalGeneration, Qwen2VLProcessor

from stages.data.conversation import Conversation, message
from stages.tasks.detection.samples.boxes import TARGET, Box, encode_boxes
from stages.training.batches import IGNORED, ConversationCollator
from tools.tiny.scenes import OBJECTS, Scene, draw_scene

PATCH_PARTS, CELL_PARTS = 2, 4
"""Into how many parts a patch and a cell are divided to say where in it an edge falls."""
MAX_SIDE = 16
"""Rows or columns of cells that can be distinguished."""
LOOKING_HEADS = 2
NAMES = (
    *(TARGET, "price-tag", "ingredients-list", "nutri-score"),
    *("best-before-date", "recycling-mark", "brand-name", "photo"),
)
"""Names of things that no scene shows. A scene with one kind of object is sometimes asked for by such a name: so the
model learns to answer with the name it was asked for, whatever it is."""


@dataclass(frozen=True)
class GridTargets:
    """Targets for the G places of one image's grid, row by row, or of several images', one by one."""

    category: Tensor
    """(G,) 1 + index of the category that covers it, 0 for none, IGNORED where it covers a fifth or less."""
    edge_part: Tensor
    """(G, 4) 1 + the part of the place in which an object's edge falls, 0 where none does."""
    digits: Tensor
    """(G, 8) hundreds, then tens, of the four edges' coordinates in 0..1000; IGNORED where no edge falls."""


def grid_targets(
    boxes: Sequence[Box], categories: Sequence[int], rows: int, columns: int, parts: int
) -> tuple[GridTargets, Tensor]:
    """Also returns (objects, 4, G), whether the place lies on that edge of that object.

    boxes: x0 y0 x1 y1 in 0..1. categories: the index of each one's.
    """
    row = torch.arange(rows, dtype=torch.float32)[:, None].expand(rows, columns).reshape(-1)
    column = torch.arange(columns, dtype=torch.float32)[None].expand(rows, columns).reshape(-1)
    category = torch.zeros(rows * columns, dtype=torch.long)
    edge_part = torch.zeros(rows * columns, 4, dtype=torch.long)
    digits = torch.full((rows * columns, 8), IGNORED)
    on_edge = torch.zeros(len(boxes), 4, rows * columns, dtype=torch.bool)
    for index, (box, kind) in enumerate(zip(boxes, categories, strict=True)):
        x0, y0, x1, y1 = box[0] * columns, box[1] * rows, box[2] * columns, box[3] * rows
        wide, high = _overlap(x0, x1, column), _overlap(y0, y1, row)
        covered = wide * high
        category[covered > 0.2] = kind + 1
        category[(covered > 0) & (covered <= 0.2) & (category == 0)] = IGNORED
        # A far edge on the border between two places belongs to the one inside the object.
        edges = ((x0, column, high), (y0, row, wide), (x1 - 1e-4, column, high), (y1 - 1e-4, row, wide))
        for edge, (at, axis, across) in enumerate(edges):
            here = (axis == int(at)) & (across > 0.1)
            coordinate = min(999, int(box[edge] * 1000))
            edge_part[here, edge] = 1 + min(parts - 1, int((at - int(at)) * parts))
            digits[here, edge] = coordinate // 100
            digits[here, 4 + edge] = coordinate // 10 % 10
            on_edge[index, edge] = here
    return GridTargets(category, edge_part, digits), on_edge


def _overlap(low: float, high: float, place: Tensor) -> Tensor:
    """Share of each place, [place, place + 1], that lies in [low, high]."""
    return (torch.clamp(place + 1, max=high) - torch.clamp(place, min=low)).clamp(min=0)


@dataclass(frozen=True)
class PointingTargets:
    """Targets of a batch, (B, T), whose images have P patches and C cells."""

    patches: GridTargets
    """G = P, in the order in which Qwen2-VL stores patches."""
    cells: GridTargets
    """G = C."""
    cell_position: Tensor
    """(C, 2) row and column."""
    look_row: Tensor
    """(N,) row of the batch in which one of N digits of coordinates is to be predicted."""
    look_query: Tensor
    """(N,) position from which it is predicted."""
    look_allowed: Tensor
    """(N, T) whether a token is a cell on the digit's edge, at which attention should look."""


class PointingLoss(nn.Module):
    """Reads a model's inner states through hooks, and holds the small heads that the losses need."""

    def __init__(self, model: Qwen2VLForConditionalGeneration, num_categories: int) -> None:
        super().__init__()
        vision, language = model.model.visual, model.model.language_model
        kinds = num_categories + 1
        vision_width, width = model.config.vision_config.embed_dim, model.config.text_config.hidden_size
        self.kinds = kinds
        self.patch_head = nn.Linear(vision_width, kinds + 4 * (PATCH_PARTS + 1))
        self.projected_head = nn.Linear(width, kinds + 4 * (CELL_PARTS + 1))
        self.position_head = nn.Linear(width, 2 * MAX_SIDE)
        self.digits_head = nn.Linear(width, kinds + 8 * 10)
        self.seen: dict[str, Tensor] = {}
        vision.blocks[len(vision.blocks) // 2 - 1].register_forward_hook(self._keep("patches"))
        vision.merger.register_forward_hook(self._keep("projected"))
        language.layers[0].register_forward_hook(self._keep("first layer"))
        language.layers[1].register_forward_hook(self._keep("second layer"))
        language.layers[2].self_attn.register_forward_hook(self._keep("attention", item=1))

    def _keep(self, name: str, item: int = 0) -> Callable[[nn.Module, object, Tensor | tuple[Tensor, ...]], None]:
        def hook(_module: nn.Module, _inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
            self.seen[name] = output[item] if isinstance(output, tuple) else output

        return hook

    def forward(self, targets: PointingTargets, is_cell: Tensor) -> Tensor:
        """The sum of the losses for the batch that the model has just seen.

        is_cell: (B, T) whether a token stands for a cell. The language model must use eager attention, the only kind
        that returns its weights.
        """
        second = self.digits_head(self.seen["second layer"][is_cell])
        digits = _classify(second[:, self.kinds :], 8, targets.cells.digits, reduction="none")  # (C, 8)
        due = (targets.cells.digits != IGNORED).float()
        hundreds, tens = (
            digits[:, edges].sum() / due[:, edges].sum().clamp(min=1) for edges in (slice(4), slice(4, 8))
        )
        attention = self.seen["attention"][targets.look_row, :LOOKING_HEADS, targets.look_query]  # (N, heads, T)
        on_edge = (attention * targets.look_allowed[:, None]).sum(-1)
        return (
            self._grid_loss(self.patch_head(self.seen["patches"]), targets.patches)
            + self._grid_loss(self.projected_head(self.seen["projected"]), targets.cells)
            + _classify(self.position_head(self.seen["first layer"][is_cell]), 2, targets.cell_position)
            + cross_entropy(second[:, : self.kinds], targets.cells.category)
            + hundreds
            + 0.5 * tens
            - torch.log(on_edge + 1e-6).mean()
        )

    def _grid_loss(self, output: Tensor, targets: GridTargets) -> Tensor:
        edges = _classify(output[:, self.kinds :], 4, targets.edge_part)
        return cross_entropy(output[:, : self.kinds], targets.category) + 2 * edges


def _classify(output: Tensor, questions: int, targets: Tensor, reduction: str = "mean") -> Tensor:
    """output: (G, questions x classes). targets: (G, questions)."""
    return cross_entropy(output.unflatten(1, (questions, -1)).transpose(1, 2), targets, reduction=reduction)


@dataclass(frozen=True)
class Example:
    scene: Scene
    conversation: Conversation
    answered: tuple[int, ...]
    """Indices of the scene's objects in the order in which the conversation answers with them."""


def question(name: str) -> str:
    return f"Detect the bounding box of the {name.replace('-', ' ')}."


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
        messages.append(message("assistant", answer))
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
        # Qwen2-VL stores the four patches of a cell, then those of the next.
        order = torch.arange(high * wide).view(high // 2, 2, wide // 2, 2).permute(0, 2, 1, 3).reshape(-1)
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
