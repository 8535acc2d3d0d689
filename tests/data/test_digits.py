import torch

import egru


def test_splits_are_disjoint_complete_and_reproducible():
    data = egru.data.digits()
    assert [len(s.y) for s in (data.train, data.validation, data.test)] == [1078, 270, 449]
    everything = torch.cat([s.x for s in (data.train, data.validation, data.test)])
    assert everything.shape == (1797, 64, 1)
    assert everything.dtype == torch.float32
    assert everything.min() == 0
    assert everything.max() == 1
    assert len(everything.flatten(1).unique(dim=0)) == 1797
    repeated = egru.data.digits()
    assert torch.equal(data.train.x, repeated.train.x)
    assert torch.equal(data.test.y, repeated.test.y)
    for split in (data.train, data.validation, data.test):
        assert split.y.unique().tolist() == list(range(10))


def test_permutation_changes_pixels_but_not_splits():
    plain, permuted = egru.data.digits(), egru.data.digits(permuted=True)
    assert permuted.name == "permuted digits"
    assert torch.equal(plain.train.y, permuted.train.y)
    assert not torch.equal(plain.train.x, permuted.train.x)
    assert torch.equal(plain.train.x.sort(1).values, permuted.train.x.sort(1).values)
