"""Examples that the tiny base for boxes is pre-trained on, and the losses that teach it to point."""

import itertools

import pytest
import torch

from stages.kit.training.batches import IGNORED
from stages.tasks.detection.samples import TARGET, decode_boxes
from tests.tiny import SMALLEST
from tools.tiny.architecture import build_tiny_qwen2_vl
from tools.tiny.detection import Settings, prepare
from tools.tiny.pointing import corpus, grid_targets, make_example, merge_order, question


@pytest.fixture(scope="module")
def processor():
    return build_tiny_qwen2_vl(corpus(), SMALLEST)[1]


def test_training_leaves_no_hook_behind():
    model, _, losses = prepare(Settings(steps=1, batch_size=1))
    assert len(list(losses)) == 1
    assert not any(module._forward_hooks for module in model.modules())
    assert model.config.text_config._attn_implementation == "sdpa"


def test_examples_ask_for_all_that_a_scene_shows():
    asked = set()
    for index, objects in itertools.product(range(150), (1, 2, 3)):
        example = make_example(0, index, objects)
        turns = [message["content"][-1]["text"] for message in example.conversation.messages]
        boxes = [box for answer in turns[1::2] for box in decode_boxes(answer).boxes]
        expected = [example.scene.boxes[i] for i in example.answered]
        assert len(boxes) == len(example.scene.boxes)
        for box, truth in zip(boxes, expected, strict=True):
            assert box == pytest.approx(truth, abs=0.001)
        assert TARGET not in example.scene.categories
        asked.add(turns[0])
    assert question(TARGET) in asked, "any name is copied, that of tables among them"


def test_grid_targets_say_where_edges_fall():
    # 0.3..0.6 of four columns is 1.2..2.4, 0.5..1 of two rows is the lower one.
    grid, on_edge = grid_targets([(0.3, 0.5, 0.6, 1.0)], [4], rows=2, columns=4, parts=4)
    assert grid.category.view(2, 4).tolist() == [[0, 0, 0, 0], [0, 5, 5, 0]]
    x0, y0, x1, y1 = grid.edge_part.view(2, 4, 4).permute(2, 0, 1).tolist()
    assert x0 == [[0, 0, 0, 0], [0, 1, 0, 0]]  # 0.2 into the cell: the first of four parts
    assert y0 == [[0, 0, 0, 0], [0, 1, 1, 0]]
    assert x1 == [[0, 0, 0, 0], [0, 0, 2, 0]]  # 0.4 into the cell: the second
    assert y1 == [[0, 0, 0, 0], [0, 4, 4, 0]]
    left, lower = grid.digits.view(2, 4, 8)[1, 1], grid.digits.view(2, 4, 8)[1, 2]
    assert left.tolist() == [3, 5, IGNORED, 9, 0, 0, IGNORED, 9]
    assert lower.tolist() == [IGNORED, 5, 6, 9, IGNORED, 0, 0, 9]
    assert torch.equal(on_edge[0].T, grid.edge_part > 0)


def test_merge_order_is_the_order_of_the_image_processor(processor):
    # Every patch in a grey of its own: row by row 0, 1, 2, ...
    rows, columns, side = 4, 6, 14
    greys = torch.arange(rows * columns, dtype=torch.uint8).view(rows, columns) * 10
    picture = greys.repeat_interleave(side, 0).repeat_interleave(side, 1)[None].expand(3, -1, -1)
    processed = processor.image_processor(picture.numpy(), return_tensors="pt", do_resize=False)
    order = processed["pixel_values"].mean(dim=1).argsort().argsort()  # the rank of each grey is its number
    assert torch.equal(order, merge_order(rows, columns))
