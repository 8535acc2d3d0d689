import pytest
import torch

from egru.data import augment, warp


def frames(rows=3, side=16):
    return torch.rand(rows, 4, 2, side, side).gt(0.7).double()


def test_identity_transforms_return_the_input():
    x = frames()
    assert torch.equal(warp(x), x)
    assert torch.equal(augment(x, crop=1.0, translate=0.0, rotate=0.0), x)


def test_rotation_by_quarter_turns_is_exact():
    x = frames()
    turned = warp(x, rotate=torch.tensor([0.0, 90.0, 180.0]))
    assert torch.equal(turned[0], x[0])
    assert torch.equal(turned[1], x[1].rot90(1, (-2, -1)))
    assert torch.equal(turned[2], x[2].flip(-1, -2))


def test_translation_by_whole_pixels_fills_with_zeros():
    x = frames(2)
    moved = warp(x, translate=torch.tensor([[3.0, 0.0], [0.0, -2.0]]))
    assert torch.equal(moved[0, ..., 3:], x[0, ..., :-3])
    assert moved[0, ..., :3].sum() == 0
    assert torch.equal(moved[1, ..., :-2, :], x[1, ..., 2:, :])
    assert moved[1, ..., -2:, :].sum() == 0


def test_crop_is_enlarged_to_the_frame():
    x = frames(2)
    half = warp(x, crop=torch.tensor([0.5, 0.5]), centre=torch.tensor([[-0.5, -0.5], [0.5, -0.5]]))
    assert torch.equal(half[0], x[0, ..., :8, :8].repeat_interleave(2, -1).repeat_interleave(2, -2))
    assert torch.equal(half[1], x[1, ..., :8, 8:].repeat_interleave(2, -1).repeat_interleave(2, -2))


def test_frames_of_a_row_move_alike_and_rows_differ():
    x = frames(1).expand(8, -1, -1, -1, -1)[:, :1].repeat(1, 5, 1, 1, 1)
    moved = augment(x, generator=torch.Generator().manual_seed(1))
    assert (moved == moved[:, :1]).all()
    assert len({tuple(row.flatten().tolist()) for row in moved}) == 8
    assert set(moved.unique().tolist()) <= {0.0, 1.0}, "binary frames stay binary"
    repeated = augment(x, generator=torch.Generator().manual_seed(1))
    assert torch.equal(moved, repeated)
    assert not torch.equal(moved, augment(x, generator=torch.Generator().manual_seed(2)))


def test_draws_stay_within_their_bounds():
    side = 65
    x = torch.zeros(300, 1, 1, side, side)
    x[..., 32, 32] = 1
    generator = torch.Generator().manual_seed(0)
    moved = augment(x, crop=1.0, translate=4.0, rotate=0.0, generator=generator)[:, 0, 0]
    positions = moved.nonzero()
    assert len(positions) == 300
    largest = (positions[:, 1:] - 32).abs().max(0).values
    assert largest.tolist() == [4, 4]
    x[..., 32, 62] = 1
    turned = augment(x, crop=1.0, translate=0.0, rotate=30.0, generator=generator)[:, 0, 0]
    positions = turned.nonzero()
    far = positions[positions[:, 2] > 40]
    assert 13 <= (far[:, 1] - 32).max() <= 15  # 30 pixels out, sin(30) = 1/2
    assert 13 <= (32 - far[:, 1]).max() <= 15


def test_crops_lie_inside_the_frame():
    ones = torch.ones(200, 1, 1, 32, 32)
    assert (augment(ones, crop=0.5, translate=0.0, rotate=0.0) == 1).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"crop": 0.0}, "crop must be a fraction"),
        ({"crop": 1.5}, "crop must be a fraction"),
        ({"rotate": -1.0}, "rotate must be finite"),
        ({"translate": float("nan")}, "translate must be finite"),
    ],
)
def test_bad_options_raise(options, message):
    with pytest.raises(ValueError, match=message):
        augment(frames(), **options)


def test_bad_frames_raise():
    for x in (torch.zeros(2, 3, 4, 5), torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.zeros(4, 4)):
        with pytest.raises(ValueError, match="frames must be floating-point"):
            warp(x)


@pytest.mark.cuda
def test_warp_agrees_on_cpu_and_gpu():
    x = torch.rand(4, 3, 2, 32, 32, dtype=torch.float32).gt(0.7).float()
    options = {"rotate": torch.tensor([0.0, 90.0, 180.0, 270.0]), "translate": torch.tensor([[2.0, -1.0]] * 4)}
    assert torch.equal(warp(x.cuda(), **options).cpu(), warp(x, **options))
    moved = augment(x.cuda(), generator=torch.Generator("cuda").manual_seed(0))
    assert moved.is_cuda
    assert not torch.equal(moved.cpu(), x)
