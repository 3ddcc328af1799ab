"""An example call for every entry of a policy that names another library's function.

The libraries are optional: `INSTALLED` has the names of those at hand. Equinox and
Haiku come with the `test` extra; `pip install transformers==4.57.* numpyro distrax`
brings the others, and test_library_functions.py runs what they have.
"""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from function_examples import Call, linen_call


def rows(n: int = 8) -> np.ndarray:
    """Activations far from zero, as large as norms meet them."""
    normal = np.random.default_rng(0).standard_normal((4, n), np.float32)
    return 20 + 300 * normal


def images() -> np.ndarray:
    return 20 + 300 * np.random.default_rng(0).standard_normal((3, 6, 6, 4), np.float32)


def _equinox(name: str, *args: Any, x: Callable[[], np.ndarray], **kwargs: Any) -> Call:
    eqx = importlib.import_module("equinox")
    layer, state = eqx.nn.make_with_state(getattr(eqx.nn, name))(*args, **kwargs)
    arrays, rest = eqx.partition((layer, state), eqx.is_array)

    def call(arrays: Any, x: Any) -> Any:
        layer, state = eqx.combine(arrays, rest)
        if not jax.tree.leaves(state):
            return jax.vmap(layer)(x), ()
        run = jax.vmap(layer, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        y, state = run(x, state)
        return y, jax.tree.leaves(eqx.filter(state, eqx.is_inexact_array))

    return call, (arrays, x())


def _batch_norm() -> Call:
    images_first = lambda: images().transpose(0, 3, 1, 2)  # noqa: E731
    return _equinox("BatchNorm", 4, "batch", mode="batch", x=images_first)


def _power_iteration() -> Call:
    module = importlib.import_module("equinox.nn._spectral_norm")
    u, v = np.ones(4, np.float32), np.ones(8, np.float32)

    def call(w: Any, u: Any, v: Any) -> Any:
        return (), module._power_iteration(w, u, v, 1e-12)

    return call, (rows() / 300, u, v)


def _haiku(name: str, *args: Any, x: Callable[[], np.ndarray]) -> Call:
    hk = importlib.import_module("haiku")
    of_call = {"is_training": True} if name == "BatchNorm" else {}
    model = hk.transform_with_state(lambda x: getattr(hk, name)(*args)(x, **of_call))
    made = model.init(jax.random.key(0), x())

    def call(made: Any, x: Any) -> Any:
        y, state = model.apply(*made, None, x)
        return y, [
            s for s in jax.tree.leaves(state) if jnp.issubdtype(s.dtype, jnp.floating)
        ]

    return call, (made, x())


def _cell_of_equinox(name: str, carried: int) -> Call:
    """A cell, of a carry of so many arrays and an input."""
    eqx = importlib.import_module("equinox")
    cell = getattr(eqx.nn, name)(8, 8, key=jax.random.key(0))
    arrays, rest = eqx.partition(cell, eqx.is_array)

    def call(arrays: Any, x: Any, *carry: Any) -> Any:
        hidden = carry if carried > 1 else carry[0]
        return jax.vmap(eqx.combine(arrays, rest))(x, hidden), ()

    return call, (arrays, _X, *[_X[::-1].copy()] * carried)


def _cell_of_haiku(name: str, carried: int) -> Call:
    hk = importlib.import_module("haiku")
    pack = hk.LSTMState if carried > 1 else lambda hidden: hidden
    model = hk.transform(lambda x, *carry: getattr(hk, name)(8)(x, pack(*carry)))
    inputs = _X, *[_X[::-1].copy()] * carried
    made = model.init(jax.random.key(0), *inputs)

    def call(made: Any, *inputs: Any) -> Any:
        return model.apply(made, None, *inputs), ()

    return call, (made, *inputs)


def _transformers(family: str, name: str) -> Call:
    module = importlib.import_module(
        f"transformers.models.{family}.modeling_flax_{family}"
    )
    layer = getattr(module, name)
    if "T5" in name:
        return linen_call(layer(8), rows())
    config = getattr(module, name.removeprefix("Flax").replace("RMSNorm", "Config"))
    return linen_call(layer(config(hidden_size=8)), rows())


_X = np.random.default_rng(1).standard_normal((4, 8)).astype(np.float32)
_P = 1 / (1 + np.exp(-_X))
_SIMPLEX = np.exp(_X) / np.exp(_X).sum(-1, keepdims=True)
_POSITIVE = np.abs(_X) + 0.5
_ONE = np.ones((4, 8), np.float32)
_COUNTS = np.eye(8, dtype=np.float32)[:4]
_BITS = (_X > 0).astype(np.int32)
_LABELS = np.arange(4, dtype=np.int32)

# What a distribution is made of, and a value of it.
_DISTRIBUTIONS: dict[str, tuple[tuple[Any, ...], Any]] = {
    "Bernoulli BernoulliLogits": ((_X,), _BITS),
    "BernoulliProbs": ((_P,), _BITS),
    "Beta Kumaraswamy": ((_POSITIVE, _POSITIVE), _P),
    "BinomialLogits": ((_X, 1), _BITS),
    "BinomialProbs": ((_P, 1), _BITS),
    "Categorical CategoricalLogits": ((_X,), _LABELS),
    "CategoricalProbs": ((_SIMPLEX,), _LABELS),
    "Cauchy Gumbel Laplace Logistic Normal": ((_X, _POSITIVE), _X[::-1].copy()),
    "VonMises": ((_P, _POSITIVE), _P[::-1].copy()),
    "Dirichlet": ((_POSITIVE,), _ONE / 8),
    "Exponential HalfCauchy HalfNormal": ((_POSITIVE,), _ONE),
    "Gamma Weibull": ((_POSITIVE, _POSITIVE), _ONE),
    "Multinomial": ((1, _X), _COUNTS),
    "MultinomialLogits": ((_X, 1), _COUNTS),
    "MultinomialProbs": ((_SIMPLEX, 1), _COUNTS),
    "MultivariateNormal": ((_X, np.eye(8, dtype=np.float32)), _X[::-1].copy()),
    "MultivariateStudentT": (
        (_ONE[:, 0] * 3, _X, np.eye(8, dtype=np.float32)),
        _X[::-1].copy(),
    ),
    "NegativeBinomialLogits": ((_POSITIVE, _X), _BITS),
    "OneHotCategorical": ((_X,), _COUNTS),
    "Poisson": ((_POSITIVE,), _BITS),
    "StudentT": ((_POSITIVE, _X, _POSITIVE), _X[::-1].copy()),
}


def _log_prob(module: str, name: str) -> Call:
    parameters, value = next(
        case for names, case in _DISTRIBUTIONS.items() if name in names.split()
    )
    make = getattr(importlib.import_module(module), name)
    arrays = tuple(p for p in parameters if isinstance(p, np.ndarray))
    # Whether a sum of 16-bit numbers is within 1e-6 of one says nothing.
    options = {"validate_args": False} if module.startswith("numpyro") else {}

    def call(value: Any, *arrays: Any) -> Any:
        rest = iter(arrays)
        filled = (next(rest) if isinstance(p, np.ndarray) else p for p in parameters)
        return make(*filled, **options).log_prob(value), ()

    return call, (value, *arrays)


_CELLS = {
    "equinox.nn.GRUCell": lambda: _cell_of_equinox("GRUCell", 1),
    "equinox.nn.LSTMCell": lambda: _cell_of_equinox("LSTMCell", 2),
    "haiku.GRU": lambda: _cell_of_haiku("GRU", 1),
    "haiku.LSTM": lambda: _cell_of_haiku("LSTM", 2),
    "haiku.VanillaRNN": lambda: _cell_of_haiku("VanillaRNN", 1),
}
_NORMS = {
    "equinox.nn.BatchNorm": _batch_norm,
    "equinox.nn.GroupNorm": lambda: _equinox("GroupNorm", 2, 8, x=rows),
    "equinox.nn.LayerNorm": lambda: _equinox("LayerNorm", 8, x=rows),
    "equinox.nn.RMSNorm": lambda: _equinox("RMSNorm", 8, x=rows),
    "equinox.nn._spectral_norm._power_iteration": _power_iteration,
    "haiku.BatchNorm": lambda: _haiku("BatchNorm", True, True, 0.9, x=images),
    "haiku.ExponentialMovingAverage": lambda: _haiku(
        "ExponentialMovingAverage", 0.9, x=rows
    ),
    "haiku.GroupNorm": lambda: _haiku("GroupNorm", 2, x=images),
    "haiku.LayerNorm": lambda: _haiku("LayerNorm", -1, True, True, x=rows),
    "haiku.RMSNorm": lambda: _haiku("RMSNorm", -1, x=rows),
    "haiku.SpectralNorm": lambda: _haiku("SpectralNorm", x=rows),
    **{
        f"transformers.models.{family}.modeling_flax_{family}.{name}": (
            lambda family=family, name=name: _transformers(family, name)
        )
        for family, name in (
            ("gemma", "FlaxGemmaRMSNorm"),
            ("llama", "FlaxLlamaRMSNorm"),
            ("longt5", "FlaxLongT5LayerNorm"),
            ("mistral", "FlaxMistralRMSNorm"),
            ("t5", "FlaxT5LayerNorm"),
        )
    },
}
_OF_DISTRAX = """
    Bernoulli Categorical Gamma Gumbel Laplace Logistic Multinomial Normal
    OneHotCategorical VonMises
"""
_ONLY_DISTRAX = {"Bernoulli", "Categorical", "Multinomial", "OneHotCategorical"}
_LOG_PROBS = {
    f"{module}.{name}.log_prob": (
        lambda module=module, name=name: _log_prob(module, name)
    )
    for module, names in (
        ("distrax", set(_OF_DISTRAX.split())),
        (
            "numpyro.distributions",
            set(" ".join(_DISTRIBUTIONS).split()) - _ONLY_DISTRAX,
        ),
    )
    for name in sorted(names)
}
LIBRARY_EXAMPLES: dict[str, Callable[[], Call]] = {
    **_CELLS,
    **_NORMS,
    **_LOG_PROBS,
}


def installed(name: str) -> bool:
    """Whether the library is here whose function a name is."""
    library = name.partition(".")[0]
    if library == "transformers":  # releases from 5 on have no Flax models
        library += ".models.t5.modeling_flax_t5"
    try:
        return importlib.util.find_spec(library) is not None
    except ModuleNotFoundError:
        return False


INSTALLED = [name for name in LIBRARY_EXAMPLES if installed(name)]
