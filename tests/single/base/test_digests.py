"""Digests of arrays: of all that an array is, and nothing else."""

import numpy as np
import pytest

from mpistrat.base.files import algorithm_of, default_algorithm, digest_of_array, digest_of_bytes


@pytest.mark.parametrize("algorithm", ["sha256", "xxh3_128"])
def test_all_that_an_array_is(algorithm):
    if algorithm != "sha256":
        pytest.importorskip("xxhash")
    array = np.arange(6, dtype="f4").reshape(2, 3)
    others = [array.T, array.reshape(6), array.astype("f8"), array.view("i4"), -array, array[:1], np.float32(0)]
    digests = {digest_of_array(np.asarray(each), "w", algorithm) for each in (array, *others)}
    assert len(digests) == 1 + len(others)
    assert digest_of_array(array, "v", algorithm) not in digests
    for same in (array.copy(), np.asfortranarray(array), array.astype(">f4"), np.repeat(array, 2, 1)[:, ::2]):
        assert digest_of_array(same, "w", algorithm) in digests
    assert {algorithm_of(each) for each in digests} == {algorithm}


def test_algorithms():
    sha = "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180-2, of "abc"
    assert digest_of_bytes(b"abc", "sha256") == sha
    assert algorithm_of(digest_of_bytes(b"abc")) == default_algorithm()
    with pytest.raises(ValueError, match="unknown digest algorithm 'md4'"):
        digest_of_bytes(b"", "md4")
