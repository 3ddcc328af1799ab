"""Layers: normalisation, recurrent cells, attention and dropout, from flax.linen."""

import flax.linen as nn
import jax
from flax.traverse_util import unflatten_dict

from ._case import OpCase, Spec, normal, positive

_X = (normal(4, 8),)
_IMAGE = (normal(2, 6, 6, 4),)


def _applied(module, *names):
    """The module as a function of its inputs, then of the parameters `names`."""

    def fn(*args):
        split = len(args) - len(names)
        flat = dict(zip(names, args[split:], strict=True))
        return module.apply({"params": unflatten_dict(flat, sep="/")}, *args[:split])

    return fn


def _batch_norm(x, scale, bias, mean, var):
    variables = {
        "params": {"scale": scale, "bias": bias},
        "batch_stats": {"mean": mean, "var": var},
    }
    module = nn.BatchNorm(use_running_average=False)
    return module.apply(variables, x, mutable=["batch_stats"])[0]


def _native_layer_norm(x, scale, bias):
    return jax.nn.standardize(x) * scale + bias


def _dropout(x):
    module = nn.Dropout(0.5, deterministic=False)
    return module.apply({}, x, rngs={"dropout": jax.random.key(0)})


def _gates(inputs: str, hidden: str, bias: str) -> tuple[tuple[str, Spec], ...]:
    """Names and shapes of a recurrent cell's parameters: 5 features in, 4 out."""
    shapes = {f"{gate}/kernel": normal(5, 4) for gate in inputs.split()}
    shapes |= {f"{gate}/kernel": normal(4, 4) for gate in hidden.split()}
    shapes |= {f"{gate}/bias": normal(4) for gate in bias.split()}
    return tuple(shapes.items())


_GRU = _gates("ir iz in", "hr hz hn", "ir iz in hn")
_LSTM = _gates("ii if ig io", "hi hf hg ho", "hi hf hg ho")
_SIMPLE = _gates("i", "h", "i")
_ATTENTION = (
    *((f"{name}/kernel", normal(8, 2, 4)) for name in ("query", "key", "value")),
    *((f"{name}/bias", normal(2, 4)) for name in ("query", "key", "value")),
    ("out/kernel", normal(2, 4, 8)),
    ("out/bias", normal(8)),
)


def _names(params):
    return [name for name, _ in params]


def _specs(params):
    return tuple(spec for _, spec in params)


def _gru_cell(h, x, *params):
    return _applied(_Carried(nn.GRUCell(4)), *_names(_GRU))(h, x, *params)


class _Carried:
    """A cell of which only the new carry is returned, as torch's cells do."""

    def __init__(self, cell):
        self.cell = cell

    def apply(self, variables, carry, x):
        return self.cell.apply(variables, carry, x)[0]


def _lstm_cell(h, c, x, *params):
    fn = _applied(_Carried(nn.LSTMCell(4)), *_names(_LSTM))
    c, h = fn((c, h), x, *params)
    return h, c


def _lstm_layer(xs, h, c, *params):
    flat = dict(zip(_names(_LSTM), params, strict=True))
    variables = {"params": {"cell": unflatten_dict(flat, sep="/")}}
    layer = nn.RNN(nn.LSTMCell(4), return_carry=True)
    (c, h), outputs = layer.apply(variables, xs, initial_carry=(c, h))
    return outputs, h, c


_NORMS = (
    OpCase(
        "layer_norm",
        _applied(nn.LayerNorm(), "scale", "bias"),
        (*_X, positive(8), normal(8)),
        "nn.LayerNorm()(x)",
    ),
    OpCase(
        "native_layer_norm",
        _native_layer_norm,
        (*_X, positive(8), normal(8)),
        "jax.nn.standardize(x) * scale + bias",
        index=(0,),
    ),
    OpCase(
        "rms_norm",
        _applied(nn.RMSNorm(), "scale"),
        (*_X, positive(8)),
        "nn.RMSNorm()(x)",
    ),
    OpCase(
        "group_norm",
        _applied(nn.GroupNorm(num_groups=2), "scale", "bias"),
        (*_IMAGE, positive(4), normal(4)),
        "nn.GroupNorm(num_groups=2)(x)",
    ),
    OpCase(
        "instance_norm",
        _applied(nn.InstanceNorm(), "scale", "bias"),
        (*_IMAGE, positive(4), normal(4)),
        "nn.InstanceNorm()(x)",
    ),
    OpCase(
        "batch_norm",
        _batch_norm,
        (*_IMAGE, positive(4), normal(4), normal(4), positive(4)),
        "nn.BatchNorm(use_running_average=False)(x)",
    ),
)

_RECURRENT = (
    OpCase(
        "GRUCell",
        _gru_cell,
        (normal(3, 4), normal(3, 5), *_specs(_GRU)),
        "nn.GRUCell(features)(h, x)",
    ),
    OpCase(
        "LSTMCell",
        _lstm_cell,
        (normal(3, 4), normal(3, 4), normal(3, 5), *_specs(_LSTM)),
        "nn.LSTMCell(features)((c, h), x)",
    ),
    OpCase(
        "RNNCell",
        _applied(_Carried(nn.SimpleCell(4)), *_names(_SIMPLE)),
        (normal(3, 4), normal(3, 5), *_specs(_SIMPLE)),
        "nn.SimpleCell(features)(h, x)",
    ),
    OpCase(
        "rnn_relu_cell",
        _applied(
            _Carried(nn.SimpleCell(4, activation_fn=jax.nn.relu)), *_names(_SIMPLE)
        ),
        (normal(3, 4), normal(3, 5), *_specs(_SIMPLE)),
        "nn.SimpleCell(features, activation_fn=jax.nn.relu)(h, x)",
    ),
    OpCase(
        "mkldnn_rnn_layer",
        _lstm_layer,
        (normal(2, 6, 5), normal(2, 4), normal(2, 4), *_specs(_LSTM)),
        "nn.RNN(nn.LSTMCell(features), return_carry=True)(xs, initial_carry=(c, h))",
        index=(0, 1, 2),
    ),
)

_OTHERS = (
    OpCase(
        "_native_multi_head_attention",
        _applied(nn.MultiHeadDotProductAttention(num_heads=2), *_names(_ATTENTION)),
        (normal(2, 6, 8), *_specs(_ATTENTION)),
        "nn.MultiHeadDotProductAttention(num_heads)(x)",
        index=(0,),
    ),
    OpCase("dropout", _dropout, _X, "nn.Dropout(0.5)(x)", values=False),
)

CASES = (*_NORMS, *_RECURRENT, *_OTHERS)
