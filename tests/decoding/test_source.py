"""Features as a source: told apart by every bit, and kept by nobody who only compares."""

import pickle
from dataclasses import FrozenInstanceError

import pytest
import torch

from pilotfish.decoding.paths import join
from pilotfish.decoding.source import Features, ids_of

VALUES = torch.arange(6, dtype=torch.float32).reshape(2, 3)


def test_features_are_the_same_if_every_bit_is():
    one, twin = Features(VALUES), Features(VALUES.clone())
    assert one == twin and hash(one) == hash(twin) and one.shape == (2, 3)
    assert Features(VALUES.T.contiguous().T) == one, "how they lie in memory is no difference"
    assert pickle.loads(pickle.dumps(one)) == one
    last_bit = VALUES.clone()
    last_bit[1, 2] = last_bit[1, 2].nextafter(torch.tensor(9.0))
    minus_zero = VALUES.clone()
    minus_zero[0, 0] = -0.0
    others = [last_bit, minus_zero, VALUES.double(), VALUES.reshape(3, 2), VALUES.half(), VALUES.bfloat16()]
    assert len({Features(other).digest for other in others} | {one.digest}) == 7


def test_nothing_of_them_is_changed_or_printed():
    one = Features(VALUES)
    with pytest.raises(FrozenInstanceError):
        one.digest = ""  # type: ignore[misc]
    assert "tensor" not in repr(one) and one.digest in repr(one)


def test_only_tokens_can_be_copied_from_and_have_paths():
    assert ids_of((3, 4)) == (3, 4) and ids_of(Features(VALUES)) == () and ids_of(()) == ()
    with pytest.raises(AssertionError, match="has no path"):
        join(Features(VALUES), [1])
