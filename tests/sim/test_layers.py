"""Convolutions against scipy's, and the gradients written for CPUs against JAX's own, which a GPU gets."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("jax", reason="JAX is not installed: pip install 'fedpick[sim]'")

from scipy.signal import correlate

from fedpick.sim.jax_engine import layers


def case(kernel: int, padding: int):
    rng = np.random.default_rng(kernel)
    x = rng.normal(size=(2, 9, 8, 3)).astype(np.float32)
    layer = {
        "weight": rng.normal(size=(kernel * kernel * 3, 4)).astype(np.float32),
        "bias": rng.normal(size=4).astype(np.float32),
    }
    return x, layer, np.pad(x, ((0, 0), (padding, padding), (padding, padding), (0, 0)))


@pytest.mark.parametrize(("kernel", "padding"), [(3, 0), (5, 2), (5, 0)])
@pytest.mark.parametrize("cpu", [True, False], ids=["CPU", "GPU"])
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


def assert_close(found, expected):
    """Equal up to the rounding of float32 sums, which grows with the largest terms."""
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * float(np.abs(expected).max()))


def loss(layer, x, kernel, padding):
    return (layers.convolution(layer, x, kernel, padding) ** 2).sum()


@pytest.mark.parametrize("repeated", [1, 10, 50])
@pytest.mark.parametrize(("kernel", "padding"), [(3, 0), (5, 2), (5, 0)])
def test_gradients_for_cpus_are_jaxs_own_also_for_several_clients_at_once(monkeypatch, kernel, padding, repeated):
    """And for mini-batches that are convolved in parts: 20 and 100 examples."""
    import jax

    x, layer, _ = case(kernel, padding)
    x = np.concatenate([x * (1 - 0.01 * index) for index in range(repeated)])
    gradient = jax.grad(loss, argnums=(0, 1))
    monkeypatch.setattr(layers, "on_cpu", lambda: False)
    expected = [gradient(layer, images, kernel, padding) for images in (x, x + 1)]
    monkeypatch.setattr(layers, "on_cpu", lambda: True)
    for images, leaves in zip((x, x + 1), expected, strict=True):
        got = gradient(layer, images, kernel, padding)
        for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(leaves), strict=True):
            assert_close(ours, theirs)
    both = jax.vmap(lambda images: jax.grad(loss)(layer, images, kernel, padding))(np.stack([x, x + 1]))
    assert_close(both["weight"][1], expected[1][0]["weight"])


def test_max_pool_leaves_out_an_odd_last_row():
    x = np.arange(2 * 5 * 4 * 1, dtype=np.float32).reshape(2, 5, 4, 1)
    pooled = np.asarray(layers.max_pool(x))
    assert pooled.shape == (2, 2, 2, 1)
    assert pooled[0, :, :, 0].tolist() == [[5.0, 7.0], [13.0, 15.0]]


@pytest.mark.parametrize("classes", [2, layers.FEW_CLASSES, layers.FEW_CLASSES + 1])
@pytest.mark.parametrize("train", [True, False])
def test_cross_entropy_is_minus_the_log_probability(classes, train):
    rng = np.random.default_rng(classes)
    logits = rng.normal(scale=30.0, size=(50, classes)).astype(np.float32)
    labels = rng.integers(0, classes, 50)
    wide = logits.astype(np.float64)
    expected = np.log(np.exp(wide - wide.max(1, keepdims=True)).sum(1)) + wide.max(1) - wide[np.arange(50), labels]
    np.testing.assert_allclose(layers.cross_entropy(logits, labels, train), expected, rtol=1e-5, atol=1e-4)


def test_the_cross_entropy_of_a_dense_layer_has_the_same_values_and_slopes_also_for_several_clients_at_once():
    import jax

    rng = np.random.default_rng(0)
    layer = {"weight": rng.normal(size=(2, 6, 5)), "bias": rng.normal(size=(2, 5))}
    layer = {name: values.astype(np.float32) for name, values in layer.items()}
    x, counted = rng.normal(size=(2, 8, 6)).astype(np.float32), rng.normal(size=8).astype(np.float32)
    labels = rng.integers(0, 5, (2, 8))

    def short(layer, x, labels):
        return (layers.dense_cross_entropy(layer, x, labels) * counted).sum()

    def long(layer, x, labels):
        return (layers.cross_entropy(layers.dense(layer, x), labels) * counted).sum()

    for derive in (lambda loss: loss, jax.grad, lambda loss: jax.grad(loss, argnums=1)):
        found, expected = (jax.vmap(derive(loss))(layer, x, labels) for loss in (short, long))
        jax.tree.map(lambda f, e: np.testing.assert_allclose(f, e, rtol=1e-4, atol=1e-5), found, expected)


@pytest.mark.parametrize("classes", [2, layers.FEW_CLASSES, layers.FEW_CLASSES + 1])
def test_the_largest_logit_is_the_first_of_equals(classes):
    rng = np.random.default_rng(classes)
    logits = rng.integers(0, 3, (200, classes)).astype(np.float32)
    labels = rng.integers(0, classes, 200)
    np.testing.assert_array_equal(layers.is_largest(logits, labels), logits.argmax(axis=1) == labels)


def test_cross_entropy_of_a_model_that_diverged_is_not_a_number():
    logits = np.array([[np.nan, 0.0], [0.0, 1.0]], np.float32)
    losses = np.asarray(layers.cross_entropy(logits, np.array([1, 1]), train=False))
    assert np.isnan(losses[0])
    assert losses[1] == pytest.approx(np.log1p(np.exp(-1.0)))
