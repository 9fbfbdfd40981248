"""The convolution made for CPUs against scipy's, and against XLA's own, which a GPU gets."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("jax", reason="JAX is not installed: pip install 'fedpick[sim]'")

from scipy.signal import correlate

from fedpick.sim import layers


def case(kernel: int, padding: int):
    rng = np.random.default_rng(kernel)
    x = rng.normal(size=(2, 9, 8, 3)).astype(np.float32)
    layer = {
        "weight": rng.normal(size=(kernel * kernel * 3, 4)).astype(np.float32),
        "bias": rng.normal(size=4).astype(np.float32),
    }
    return x, layer, np.pad(x, ((0, 0), (padding, padding), (padding, padding), (0, 0)))


@pytest.mark.parametrize(("kernel", "padding"), [(3, 0), (5, 2), (5, 0)])
@pytest.mark.parametrize("cpu", [True, False], ids=["matrix product", "XLA's convolution"])
def test_convolution_is_the_textbooks(monkeypatch, kernel, padding, cpu):
    monkeypatch.setattr(layers, "on_cpu", lambda: cpu)
    x, layer, padded = case(kernel, padding)
    filters = layer["weight"].reshape(kernel, kernel, 3, 4)
    expected = np.stack(
        [
            np.stack([correlate(image, filters[..., f], mode="valid")[..., 0] for f in range(4)], axis=-1)
            for image in padded
        ]
    )
    got = layers.convolution(layer, x, kernel, padding)
    np.testing.assert_allclose(got, expected + layer["bias"], rtol=1e-4, atol=1e-4)


def test_max_pool_leaves_out_an_odd_last_row():
    x = np.arange(2 * 5 * 4 * 1, dtype=np.float32).reshape(2, 5, 4, 1)
    pooled = np.asarray(layers.max_pool(x))
    assert pooled.shape == (2, 2, 2, 1)
    assert pooled[0, :, :, 0].tolist() == [[5.0, 7.0], [13.0, 15.0]]
