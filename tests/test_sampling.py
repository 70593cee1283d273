"""The two forms of the noise's key are one function."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from duochat.engine.sampling import key, keys


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**31 - 1))
def test_one_key_is_the_array_form(seed, position):
    assert key(seed, position) == keys(seed, np.array([position]))[0]
