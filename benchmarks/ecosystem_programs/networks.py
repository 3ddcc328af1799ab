"""Neural networks, each as its library writes them."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from ecosystem_programs import Training, program

KEY = jax.random.key(0)
IMAGES = jax.random.normal(jax.random.key(1), (16, 16, 16, 3))
LABELS = jnp.arange(16) % 4
TOKENS = jax.random.randint(jax.random.key(2), (8, 16), 0, 50)
FEATURES = jax.random.normal(jax.random.key(3), (64, 8))
TARGETS = jnp.sin(FEATURES[:, :2] * 2)


def cross_entropy(logits: Any, labels: Any) -> Any:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean()


def next_token(logits: Any, tokens: Any) -> Any:
    return cross_entropy(logits, jnp.roll(tokens, -1, 1))


@program("flax")
def flax_linen_transformer() -> Training:
    """A transformer encoder of flax.linen on tokens."""
    import flax.linen as nn

    class Encoder(nn.Module):
        @nn.compact
        def __call__(self, tokens: Any) -> Any:
            x = nn.Embed(50, 32)(tokens)
            for _ in range(2):
                y = nn.LayerNorm()(x)
                x = x + nn.MultiHeadDotProductAttention(num_heads=4)(y, y)
                x = x + nn.Dense(32)(nn.gelu(nn.Dense(64)(nn.LayerNorm()(x))))
            return nn.Dense(50)(nn.LayerNorm()(x))

    model = Encoder()
    params = model.init(KEY, TOKENS)

    def loss(params: Any, tokens: Any) -> Any:
        return next_token(model.apply(params, tokens), tokens)

    return Training(loss, params, TOKENS)


@program("flax")
def flax_nnx_convolutions() -> Training:
    """A convolutional classifier of flax.nnx with BatchNorm."""
    from flax import nnx

    class Network(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.conv = nnx.Conv(3, 16, (3, 3), rngs=rngs)
            self.norm = nnx.BatchNorm(16, rngs=rngs)
            self.head = nnx.Linear(16, 4, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            x = nnx.relu(self.norm(self.conv(x)))
            return self.head(x.mean((1, 2)))

    graph, params, rest = nnx.split(Network(nnx.Rngs(0)), nnx.Param, ...)

    def loss(params: Any, batch: Any) -> Any:
        model = nnx.merge(graph, params, rest, copy=True)
        return cross_entropy(model(batch[0]), batch[1])

    return Training(loss, params, (IMAGES, LABELS))


@program("equinox")
def equinox_attention() -> Training:
    """A transformer block of Equinox, its examples batched by vmap."""
    import equinox as eqx

    class Block(eqx.Module):
        embed: eqx.nn.Embedding
        attention: eqx.nn.MultiheadAttention
        norm: eqx.nn.LayerNorm
        mlp: eqx.nn.MLP
        head: eqx.nn.Linear

        def __init__(self, key: Any):
            keys = jax.random.split(key, 4)
            self.embed = eqx.nn.Embedding(50, 32, key=keys[0])
            self.attention = eqx.nn.MultiheadAttention(4, 32, key=keys[1])
            self.norm = eqx.nn.LayerNorm(32)
            self.mlp = eqx.nn.MLP(32, 32, 64, 1, jax.nn.gelu, key=keys[2])
            self.head = eqx.nn.Linear(32, 50, key=keys[3])

        def __call__(self, tokens: Any) -> Any:
            x = jax.vmap(self.embed)(tokens)
            y = jax.vmap(self.norm)(x)
            x = x + self.attention(y, y, y)
            x = x + jax.vmap(self.mlp)(jax.vmap(self.norm)(x))
            return jax.vmap(self.head)(x)

    params, static = eqx.partition(Block(KEY), eqx.is_inexact_array)

    def loss(params: Any, tokens: Any) -> Any:
        model = eqx.combine(params, static)
        return next_token(jax.vmap(model)(tokens), tokens)

    return Training(loss, params, TOKENS)


@program("dm-haiku")
def haiku_lstm() -> Training:
    """An LSTM of Haiku over a sequence, with LayerNorm."""
    import haiku as hk

    def forward(tokens: Any) -> Any:
        x = hk.Embed(50, 32)(tokens)
        core = hk.LSTM(32)
        x, _ = hk.dynamic_unroll(
            core, x.swapaxes(0, 1), core.initial_state(tokens.shape[0])
        )
        x = hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)
        return hk.Linear(50)(x.swapaxes(0, 1))

    model = hk.without_apply_rng(hk.transform(forward))
    params = model.init(KEY, TOKENS)

    def loss(params: Any, tokens: Any) -> Any:
        return next_token(model.apply(params, tokens), tokens)

    return Training(loss, params, TOKENS)


@program("dm-haiku")
def haiku_residual_network() -> Training:
    """A residual block of Haiku with BatchNorm, training."""
    import haiku as hk

    def forward(x: Any) -> Any:
        x = hk.Conv2D(16, 3)(x)
        for _ in range(2):
            y = jax.nn.relu(hk.BatchNorm(True, True, 0.9)(x, is_training=True))
            x = x + hk.Conv2D(16, 3)(y)
        return hk.Linear(4)(x.mean((1, 2)))

    model = hk.transform_with_state(forward)
    params, state = model.init(KEY, IMAGES)

    def loss(params: Any, batch: Any) -> Any:
        logits, _ = model.apply(params, state, None, batch[0])
        return cross_entropy(logits, batch[1])

    return Training(loss, params, (IMAGES, LABELS))


SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}


def of_transformers(model: Any, loss: Any, batch: Any) -> Training:
    return Training(
        lambda params, batch: loss(model(**batch, params=params), batch),
        model.params,
        batch,
        learning_rate=3e-3,
        steps=20,
    )


@program("transformers")
def transformers_gpt2() -> Training:
    """Hugging Face's Flax GPT-2, two layers, as a language model."""
    from transformers import FlaxGPT2LMHeadModel, GPT2Config

    config = GPT2Config(vocab_size=50, n_positions=16, n_embd=32, n_layer=2, n_head=4)
    return of_transformers(
        FlaxGPT2LMHeadModel(config, input_shape=(1, 16)),
        lambda out, b: next_token(out.logits, b["input_ids"]),
        {"input_ids": TOKENS},
    )


@program("transformers")
def transformers_bert() -> Training:
    """Hugging Face's Flax BERT, two layers, as a classifier."""
    from transformers import BertConfig, FlaxBertForSequenceClassification

    config = BertConfig(
        vocab_size=50,
        **SIZES,
        max_position_embeddings=16,
        num_labels=4,
    )
    return of_transformers(
        FlaxBertForSequenceClassification(config, input_shape=(1, 16)),
        lambda out, b: cross_entropy(out.logits, jnp.arange(8) % 4),
        {"input_ids": TOKENS},
    )


@program("transformers")
def transformers_llama() -> Training:
    """Hugging Face's Flax Llama, two layers, with rotary embeddings and RMSNorm."""
    from transformers import FlaxLlamaForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=50,
        **SIZES,
        max_position_embeddings=16,
    )
    return of_transformers(
        FlaxLlamaForCausalLM(config, input_shape=(1, 16)),
        lambda out, b: next_token(out.logits, b["input_ids"]),
        {"input_ids": TOKENS},
    )


@program("transformers")
def transformers_vit() -> Training:
    """Hugging Face's Flax vision transformer, two layers."""
    from transformers import FlaxViTForImageClassification, ViTConfig

    config = ViTConfig(
        **SIZES,
        image_size=16,
        patch_size=4,
        num_labels=4,
    )
    return of_transformers(
        FlaxViTForImageClassification(config),
        lambda out, b: cross_entropy(out.logits, LABELS),
        {"pixel_values": IMAGES.transpose(0, 3, 1, 2)},
    )


@program("transformers")
def transformers_whisper() -> Training:
    """Hugging Face's Flax Whisper, audio features in, tokens out."""
    from transformers import FlaxWhisperForConditionalGeneration, WhisperConfig

    config = WhisperConfig(
        vocab_size=50,
        num_mel_bins=8,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_source_positions=32,
        max_target_positions=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    features = jax.random.normal(KEY, (8, 8, 64))
    return of_transformers(
        FlaxWhisperForConditionalGeneration(config, input_shape=(1, 8, 64)),
        lambda out, b: cross_entropy(out.logits, b["decoder_input_ids"]),
        {"input_features": features, "decoder_input_ids": TOKENS},
    )


@program("penzai")
def penzai_network() -> Training:
    """A network of Penzai, its axes named."""
    from penzai import pz

    model = pz.nn.Sequential(
        [
            pz.nn.Affine.from_config("a", KEY, {"in": 8}, {"hidden": 32}),
            pz.nn.Elementwise(jax.nn.gelu),
            pz.nn.LayerNorm.from_config("n", KEY, {"hidden": 32}),
            pz.nn.Affine.from_config("b", KEY, {"hidden": 32}, {"out": 2}),
        ]
    )
    unbound, variables = pz.unbind_params(model)
    params = tuple(variable.freeze() for variable in variables)

    def loss(params: Any, batch: Any) -> Any:
        named = pz.nx.wrap(batch[0]).tag("batch", "in")
        found = pz.bind_variables(unbound, params)(named)
        return jnp.mean((found.unwrap("batch", "out") - batch[1]) ** 2)

    return Training(loss, params, (FEATURES, TARGETS))


@program("keras")
def keras_network() -> Training:
    """A convolutional network of Keras on its JAX backend, stateless."""
    import os

    os.environ["KERAS_BACKEND"] = "jax"
    import keras

    model = keras.Sequential(
        [
            keras.Input((16, 16, 3)),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.LayerNormalization(),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(4),
        ]
    )
    rest = [v.value for v in model.non_trainable_variables]

    def loss(params: Any, batch: Any) -> Any:
        logits, _ = model.stateless_call(params, rest, batch[0])
        return cross_entropy(logits, batch[1])

    params = [v.value for v in model.trainable_variables]
    return Training(loss, params, (IMAGES, LABELS))


@program("flaxmodels")
def flaxmodels_resnet() -> Training:
    """ResNet-18 of flaxmodels on small pictures, BatchNorm in use."""
    import flaxmodels

    model = flaxmodels.ResNet18(
        output="logits", pretrained=None, num_classes=4, normalize=False
    )
    variables = model.init(KEY, IMAGES)

    def loss(params: Any, batch: Any) -> Any:
        held = {**variables, "params": params}
        logits = model.apply(held, batch[0], train=False)
        return cross_entropy(logits, batch[1])

    return Training(
        loss, variables["params"], (IMAGES, LABELS), learning_rate=1e-3, steps=5
    )
