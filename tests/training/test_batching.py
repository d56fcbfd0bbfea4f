import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inlay.training.batching import padding_share, portion, reading_batches, training_batches

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=200).map(torch.tensor)


@settings(deadline=None)  # no test depends on the speed of the machine
@given(LENGTHS, st.integers(1, 40), st.integers(0, 5), st.integers(0, 3))
def test_an_epoch_is_every_row_once(lengths, batch_size, seed, epoch):
    batches = training_batches(lengths, batch_size, seed, epoch)
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    assert all(1 <= len(batch) <= batch_size for batch in batches)
    assert sorted(row for batch in reading_batches(lengths, batch_size) for row in batch) == list(range(len(lengths)))


def test_the_order_follows_from_seed_and_epoch_alone():
    lengths = torch.randint(1, 60, (500,))
    first = training_batches(lengths, 8, 3, 1)
    torch.manual_seed(99)
    assert training_batches(lengths, 8, 3, 1) == first
    assert training_batches(lengths, 8, 4, 1) != first
    assert training_batches(lengths, 8, 3, 2) != first


def test_batches_of_like_length_pad_little():
    lengths = torch.randint(5, 100, (4000,))
    by_length = padding_share(lengths, training_batches(lengths, 16, 0, 0))
    shuffled = padding_share(lengths, [batch.tolist() for batch in torch.randperm(4000).split(16)])
    assert by_length < 0.1 < shuffled


def test_portions_share_out_every_row():
    rows = list(range(11))
    assert sorted(row for part in range(3) for row in portion(rows, part, 3)) == rows
