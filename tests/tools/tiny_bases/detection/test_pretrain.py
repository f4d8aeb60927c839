import dataclasses
import itertools
import json
from collections.abc import Iterator

import pytest
import torch
from transformers import AutoModelForImageTextToText

from stages.kit.models.load import load_config
from stages.kit.models.without_torchvision import PicturesOnlyProcessor
from stages.tasks.detection.samples.boxes import decode_boxes
from stages.tasks.detection.samples.records import TARGET
from tests import ROOT
from tools.tiny_bases.architecture import SMALLEST, build_tiny_qwen2_vl
from tools.tiny_bases.detection.__main__ import HELD_OUT_SEED, Settings, measure, model_card, train
from tools.tiny_bases.detection.batches import coordinate_digits, corpus, make_batch, make_example, question
from tools.tiny_bases.detection.pointing import IGNORED, grid_targets, merge_order

BASE = ROOT / "data" / "tiny" / "qwen2-vl"
THREE_LAYERS = dataclasses.replace(SMALLEST, num_layers=3)
"""The least that PointingLoss can look into."""
RECORD = json.loads((BASE / "pretraining.json").read_text())


@pytest.fixture(autouse=True)
def _other_tests_keep_their_settings() -> Iterator[None]:
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


@pytest.fixture(scope="module")
def processor():
    return build_tiny_qwen2_vl(corpus(), SMALLEST)[1]


def test_the_first_steps_of_the_committed_base_still_reproduce():
    # The threads that the tests have: more would only wait for each other, and matter less than the tolerance.
    settings = dataclasses.replace(Settings(**RECORD["settings"]), threads=torch.get_num_threads())
    model, processor = build_tiny_qwen2_vl(corpus(), seed=settings.seed)
    steps = 3
    losses = list(itertools.islice(train(model, processor, settings), steps))
    # Another processor adds numbers in another order; another scene or weight changes far more than that.
    assert losses == pytest.approx(RECORD["first_losses"][:steps], abs=2e-3)


def test_the_card_is_what_the_record_says():
    assert (BASE / "README.md").read_text() == model_card(RECORD)


def test_the_committed_base_is_good_at_its_own_scenes_and_poor_at_tables():
    model = AutoModelForImageTextToText.from_pretrained(BASE, dtype=torch.float32)
    processor = PicturesOnlyProcessor.from_pretrained(BASE)
    own = measure(model, processor, ("objects",), HELD_OUT_SEED, 32)
    tables = measure(model, processor, ("front", "back"), HELD_OUT_SEED, 48)
    assert own["mean_iou"] > 0.8
    assert tables["mean_iou"] < 0.3
    assert min(own["detection_rate"], tables["detection_rate"]) > 0.95  # it answers in the right form


def test_the_committed_weights_hold_the_model_and_nothing_of_its_training():
    model, info = AutoModelForImageTextToText.from_pretrained(BASE, output_loading_info=True)
    assert load_config(BASE).model_type == "qwen2_vl"
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert sum(path.stat().st_size for path in BASE.iterdir()) <= 8_000_000


def test_training_steps_leave_the_same_model_behind(processor):
    def trained() -> torch.Tensor:
        model, _ = build_tiny_qwen2_vl(corpus(), THREE_LAYERS, seed=1)
        settings = Settings(steps=2, batch_size=2, seed=1, warmup_steps=1)
        list(train(model, processor, settings))
        assert not any(module._forward_hooks for module in model.modules())
        return model.lm_head.weight.detach()

    torch.testing.assert_close(trained(), trained(), rtol=0, atol=0)


def test_examples_ask_for_all_that_a_scene_shows():
    for index, objects in itertools.product(range(30), (1, 2, 3)):
        example = make_example(0, index, objects)
        turns = [message["content"][-1]["text"] for message in example.conversation.messages]
        boxes = [box for answer in turns[1::2] for box in decode_boxes(answer).boxes]
        expected = [example.scene.boxes[i] for i in example.answered]
        assert len(boxes) == len(example.scene.boxes)
        for box, truth in zip(boxes, expected, strict=True):
            assert box == pytest.approx(truth, abs=0.001)
        assert TARGET not in example.scene.categories


def test_any_name_is_learnt_to_be_copied_the_tables_among_them():
    asked = {make_example(0, index, 1).conversation.messages[0]["content"][-1]["text"] for index in range(150)}
    assert question(TARGET) == "Detect the bounding box of the nutrition table."
    assert question(TARGET) in asked


def test_grid_targets_say_where_edges_fall():
    # 0.3..0.6 of four columns is 1.2..2.4, 0.5..1 of two rows is the lower one.
    grid = grid_targets([(0.3, 0.5, 0.6, 1.0)], [4], rows=2, columns=4, parts=4)
    assert grid.category.view(2, 4).tolist() == [[0, 0, 0, 0], [0, 5, 5, 0]]
    x0, y0, x1, y1 = grid.edge_part.view(2, 4, 4).permute(2, 0, 1).tolist()
    assert x0 == [[0, 0, 0, 0], [0, 1, 0, 0]]  # 0.2 into the cell: the first of four parts
    assert y0 == [[0, 0, 0, 0], [0, 1, 1, 0]]
    assert x1 == [[0, 0, 0, 0], [0, 0, 2, 0]]  # 0.4 into the cell: the second
    assert y1 == [[0, 0, 0, 0], [0, 4, 4, 0]]
    left, lower = grid.digits.view(2, 4, 8)[1, 1], grid.digits.view(2, 4, 8)[1, 2]
    assert left.tolist() == [3, 5, IGNORED, 9, 0, 0, IGNORED, 9]
    assert lower.tolist() == [IGNORED, 5, 6, 9, IGNORED, 0, 0, 9]
    assert grid.on_edge.shape == (1, 4, 8)
    assert torch.equal(grid.on_edge[0].T, grid.edge_part > 0)


def test_merge_order_is_the_order_of_the_image_processor(processor):
    # Every patch in a grey of its own: row by row 0, 1, 2, ...
    rows, columns, side = 4, 6, 14
    greys = torch.arange(rows * columns, dtype=torch.uint8).view(rows, columns) * 10
    picture = greys.repeat_interleave(side, 0).repeat_interleave(side, 1)[None].expand(3, -1, -1)
    processed = processor.image_processor(picture.numpy(), return_tensors="pt", do_resize=False)
    order = processed["pixel_values"].mean(dim=1).argsort().argsort()  # the rank of each grey is its number
    assert torch.equal(order, merge_order(rows, columns))


def test_attention_is_sent_to_the_cells_on_the_edge_that_is_written(processor):
    inputs, targets = make_batch(processor, seed=0, step=2, batch_size=3)
    tokenizer, looks = processor.tokenizer, targets.looks
    cells_before = 0
    for row in range(3):
        ids = inputs["input_ids"][row]
        rows, columns = (int(side) // 2 for side in inputs["image_grid_thw"][row, 1:])
        first_cell = int((ids == tokenizer.convert_tokens_to_ids("<|image_pad|>")).nonzero()[0])
        found = list(coordinate_digits(tokenizer, ids.tolist(), inputs["labels"][row].tolist()))
        of_row = (looks.row == row).nonzero().flatten().tolist()
        assert [query for query, _, _ in found] == looks.query[of_row].tolist()
        for index, (query, _, edge) in zip(of_row, found, strict=True):
            written = ""
            while (token := tokenizer.decode(ids[query + 1 + len(written)])).isdigit():
                written += token
            if tokenizer.decode(ids[query]).isdigit():  # the coordinate's second digit
                continue
            cells = looks.allowed[index].nonzero().flatten() - first_cell
            at = int(written) / 1000 * (columns if edge % 2 == 0 else rows)
            places = cells % columns if edge % 2 == 0 else cells // columns
            assert len(cells) > 0
            assert ((places - 0.1 <= at) & (at <= places + 1.1)).all()
        cells_before += rows * columns
    assert cells_before == len(targets.cell_category)
