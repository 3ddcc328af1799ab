"""A bidirectional LSTM that tags words, in Flax linen (Huang et al. 2015)."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from ._task import STEPS, Task, drawn

VOCABULARY, TAGS, LENGTH, SIZE = 50, 6, 16, 8


class Tagger(nn.Module):
    """Embedded words, an LSTM in each direction, and scores of every tag."""

    @nn.compact
    def __call__(self, words, lengths):
        x = nn.Embed(VOCABULARY, 32)(words)
        forth, back = nn.RNN(nn.LSTMCell(32)), nn.RNN(nn.LSTMCell(32))
        x = nn.Bidirectional(forth, back)(x, seq_lengths=lengths)
        return nn.Dense(TAGS)(x)


def tagged_sentences(rng):
    """Batches of words, lengths and tags that depend on both neighbours as well."""
    votes = (
        rng.standard_normal((3, VOCABULARY, TAGS)) * np.array([1, 3, 1])[:, None, None]
    )
    batches = []
    for _ in range(STEPS):
        words = rng.integers(VOCABULARY, size=(SIZE, LENGTH))
        before, after = np.roll(words, 1, axis=1), np.roll(words, -1, axis=1)
        scores = votes[0, before] + votes[1, words] + votes[2, after]
        lengths = rng.integers(LENGTH // 2, LENGTH + 1, size=SIZE)
        batches.append((words, lengths, scores.argmax(-1)))
    return batches


def make_task() -> Task:
    """Tags of words within each sentence's length, by Adam."""
    model, batches = Tagger(), tagged_sentences(np.random.default_rng(5))
    shapes = jax.eval_shape(model.init, jax.random.key(5), *batches[0][:2])
    params = drawn(shapes, np.random.default_rng(5))

    def loss_fn(params, state, batch):
        words, lengths, tags = batch
        logits = model.apply(params, words, lengths)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tags)
        real = jnp.arange(LENGTH) < lengths[:, None]
        return jnp.sum(losses * real) / jnp.sum(real), state

    return Task(loss_fn, params, None, batches, optax.adam(2e-2))
